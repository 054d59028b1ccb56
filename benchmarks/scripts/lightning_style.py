"""A module with training_step and configure_optimizers, run by a small trainer that moves the batches."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 16))
        self.loss_fn = nn.MSELoss(reduction="none")
        self.register_buffer("feature_weight", torch.linspace(0.5, 1.5, 16))

    @property
    def device(self):
        return next(self.parameters()).device

    def forward(self, x):
        return self.encoder(x)

    def training_step(self, batch, batch_idx):
        x, labels = batch
        x = x.view(x.size(0), -1)
        z = self(x + 0.01 * torch.randn(x.shape, device=self.device))
        centers = torch.eye(3, device=self.device)
        loss = (self.loss_fn(self.decoder(z), x) * self.feature_weight).mean()
        loss = loss + 0.1 * F.mse_loss(z, centers[labels])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def log(self, name, value):
        print(f"{name} {value.item():.4f}")


class Trainer:
    def __init__(self, accelerator, max_steps):
        self.device, self.max_steps = torch.device(accelerator), max_steps

    def transfer_batch_to_device(self, batch):
        batch = [part.to(self.device) for part in batch]
        return batch

    def fit(self, module, dataloader, ckpt_path=None):
        module.to(self.device)
        optimizers, schedulers = module.configure_optimizers()
        if ckpt_path is not None:
            checkpoint = torch.load(ckpt_path, map_location=self.device, weights_only=True)
            module.load_state_dict(checkpoint["state_dict"])
            for group, part in (("optimizer_states", optimizers), ("lr_schedulers", schedulers)):
                for one, state in zip(part, checkpoint[group]):
                    one.load_state_dict(state)
        module.train()
        for batch_idx, batch in enumerate(dataloader):
            batch = self.transfer_batch_to_device(batch)
            for optimizer in optimizers:
                loss = module.training_step(batch, batch_idx)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if batch_idx + 1 == self.max_steps:
                break
        self.state = {
            "state_dict": module.state_dict(),
            "optimizer_states": [one.state_dict() for one in optimizers],
            "lr_schedulers": [one.state_dict() for one in schedulers],
            "pytorch-lightning_version": "2.4.0",
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", dest="ckpt_path")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    dataset = TensorDataset(torch.rand(32, 1, 4, 4), torch.randint(3, (32,)))
    trainer = Trainer(accelerator=args.device, max_steps=2)
    trainer.fit(LitAutoEncoder(), DataLoader(dataset, batch_size=8), ckpt_path=args.ckpt_path)
    if args.save:
        torch.save(trainer.state, args.save)


if __name__ == "__main__":
    main()
