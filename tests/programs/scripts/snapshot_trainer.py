"""In the form of PyTorch's tutorial series on DDP: a `Trainer` that goes on from its snapshot."""

import os

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class MyTrainDataset(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(3)
        self.data = [
            (torch.rand(20, generator=generator), torch.rand(1, generator=generator))
            for _ in range(size)
        ]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.model, self.train_data, self.optimizer = model, train_data, optimizer
        self.save_every, self.snapshot_path = save_every, snapshot_path
        self.epochs_run, self.losses = 0, []
        if os.path.exists(snapshot_path):
            self._load_snapshot()
        self.model = DDP(self.model)

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, weights_only=True)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        print(f"Resuming training from snapshot at Epoch {self.epochs_run}")

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        losses_of[epoch] = [self._run_batch(source, targets) for source, targets in self.train_data]

    def _save_snapshot(self, epoch):
        snapshot = {
            "MODEL_STATE": self.model.module.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": epoch + 1,
        }
        torch.save(snapshot, self.snapshot_path)

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)
            torch.distributed.barrier()


def load_train_objs():
    torch.manual_seed(1)
    model = torch.nn.Linear(20, 1)
    return MyTrainDataset(32), model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def prepare_dataloader(dataset, batch_size):
    return DataLoader(
        dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset)
    )


def main(save_every, total_epochs, batch_size, snapshot_path="snapshot.pt"):
    dataset, model, optimizer = load_train_objs()
    trainer = Trainer(
        model, prepare_dataloader(dataset, batch_size), optimizer, save_every, snapshot_path
    )
    trainer.train(total_epochs)
    return trainer


# %%
losses_of: dict[int, list[float]] = {}
# Once: under torchrun, a second group on the same store may read the addresses of the first one.
init_process_group(backend="gloo")
main(1, 2, 4)

# %% steps
trainer = main(1, 5, 4)

# %%
losses = [loss for epoch in sorted(losses_of) for loss in losses_of[epoch]]
parameters = list(trainer.model.parameters())
destroy_process_group()
