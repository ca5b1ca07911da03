"""DDP: steps per second of a loop, as a script."""

import runpy
import time
from pathlib import Path

import torch.distributed as dist

NUM_WARMUPS, NUM_STEPS = 20, 150

dist.init_process_group("gloo")
step = runpy.run_path(str(Path(__file__).with_name("ddp.py")))["step"]
for _ in range(NUM_WARMUPS):
    step()
began = time.perf_counter()
for _ in range(NUM_STEPS):
    step()
if dist.get_rank() == 0:
    print(NUM_STEPS / (time.perf_counter() - began), flush=True)
dist.destroy_process_group()
