"""A rank under torchrun: runs a program once, and times its steps when it is told to.

``python -m torch.distributed.run ... torchrun_rank.py PROGRAM SOCKET``. It waits between batches,
as the ranks of a mesh do, so that both can be there at once and be measured in turn.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Client

import torch.distributed as dist

# Run on the ranks of both: what is timed is the same source.
TIMED_LOOP = """
import time

dist.barrier()
began = time.perf_counter(), time.process_time()
for _ in range({num_steps}):
    step()
taken = time.perf_counter() - began[0], time.process_time() - began[1]
"""


def main() -> None:
    """Serve until told 0 steps."""
    program, address = sys.argv[1:]
    dist.init_process_group("gloo")
    names = {"__name__": "__main__", "dist": dist}
    with open(program) as file:
        exec(compile(file.read(), program, "exec"), names)
    with Client(address, "AF_UNIX") as driver:
        driver.send(int(os.environ["RANK"]))
        while num_steps := driver.recv():
            exec(TIMED_LOOP.format(num_steps=num_steps), names)
            driver.send(names["taken"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
