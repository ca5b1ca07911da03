"""In the form of Lightning's examples: module, data module, callback, `Trainer.fit` under DDP."""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        self.data = TensorDataset(
            torch.randn(24, 6, generator=generator), torch.randn(24, 2, generator=generator)
        )

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=4, shuffle=True)


class LitModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Keep(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.seen.append(outputs["loss"].item())


# %%
L.seed_everything(7)
model = LitModel()

# %% steps
model.seen.clear()
L.seed_everything(8)
trainer = L.Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[Keep()],
)
trainer.fit(model, datamodule=Data())

# %%
losses, parameters = model.seen, list(model.parameters())
