"""In the form of the transformers' examples: a small GPT-2 with random weights under `Trainer`."""

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Tokens(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(32, (size, 8), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Keep(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        losses.extend(value for key, value in sorted(logs.items()) if key in ("loss", "grad_norm"))


# %%
set_seed(5)
config = GPT2Config(
    vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
model = GPT2LMHeadModel(config)
args = TrainingArguments(
    output_dir="out",
    use_cpu=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=3,
    logging_steps=1,
    save_strategy="steps",
    save_steps=2,
    report_to=[],
    disable_tqdm=True,
)

# %% steps
losses: list[float] = []
trainer = Trainer(model=model, args=args, train_dataset=Tokens(48), callbacks=[Keep()])
trainer.train()

# %%
parameters = list(model.parameters())
