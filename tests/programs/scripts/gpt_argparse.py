"""In the form of minGPT: a GPT, a dataset of sums, a trainer with callbacks, options by
argparse.
"""

import argparse
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head = n_head

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (
            each.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for each in self.c_attn(x).split(c, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, args, vocab_size, block_size):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, args.n_embd)
        self.wpe = nn.Embedding(block_size, args.n_embd)
        self.h = nn.ModuleList(Block(args.n_embd, args.n_head) for _ in range(args.n_layer))
        self.ln_f = nn.LayerNorm(args.n_embd)
        self.lm_head = nn.Linear(args.n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class SortDataset(Dataset):
    def __init__(self, size, length=4, num_digits=3):
        generator = torch.Generator().manual_seed(0)
        self.items = torch.randint(num_digits, (size, length), generator=generator)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        item = self.items[index]
        cat = torch.cat((item, item.sort()[0]))
        y = cat[1:].clone()
        y[: len(item) - 1] = -1
        return cat[:-1], y


class Trainer:
    def __init__(self, args, model, dataset):
        self.args, self.model, self.dataset = args, DistributedDataParallel(model), dataset
        self.callbacks = defaultdict(list)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95)
        )

    def run(self):
        sampler = DistributedSampler(self.dataset, shuffle=True, seed=5)
        loader = DataLoader(self.dataset, sampler=sampler, batch_size=self.args.batch_size)
        self.iter_num, self.losses = 0, []
        for x, y in loader:
            self.model.zero_grad(set_to_none=True)
            self.loss = self.model(x, y)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.grad_norm_clip)
            self.optimizer.step()
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            self.iter_num += 1
            if self.iter_num >= self.args.max_iters:
                break


# %%
parser = argparse.ArgumentParser(description="sorts digits")
parser.add_argument("--n-layer", type=int, default=1)
parser.add_argument("--n-head", type=int, default=2)
parser.add_argument("--n-embd", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--learning-rate", type=float, default=3e-4)
parser.add_argument("--grad-norm-clip", type=float, default=1.0)
parser.add_argument("--max-iters", type=int, default=2)
args = parser.parse_args()

# %%
dist.init_process_group("gloo")
torch.manual_seed(3407)
trainer = Trainer(args, GPT(args, vocab_size=3, block_size=7), SortDataset(64))
trainer.callbacks["on_batch_end"].append(lambda trainer: trainer.losses.append(trainer.loss.item()))

# %% steps
trainer.run()

# %%
losses, parameters = trainer.losses, list(trainer.model.parameters())
dist.destroy_process_group()
