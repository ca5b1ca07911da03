"""In the form of accelerate's examples: `prepare`, `accumulate`, `gather_for_metrics`,
`save_state`.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def evaluate(model, loader):
    model.eval()
    found = []
    for x, y in loader:
        with torch.no_grad():
            predictions = model(x)
        predictions, references = accelerator.gather_for_metrics((predictions, y))
        found.append(nn.functional.mse_loss(predictions, references).item())
    return found


# %%
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(11)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
data = TensorDataset(torch.randn(22, 6), torch.randn(22, 2))
loader = DataLoader(data, batch_size=3, shuffle=False)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

# %% steps
losses = []
accelerator.step, accelerator.sync_gradients = (
    0,
    True,
)  # an accumulation that was begun is not gone on with
model.train()
optimizer.zero_grad()
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())

# %%
accelerator.wait_for_everyone()
accelerator.save_state("state")
accelerator.wait_for_everyone()
accelerator.load_state("state")
losses += evaluate(model, loader)
parameters = list(model.parameters())
accelerator.end_training()
