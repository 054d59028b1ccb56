"""A module that owns its loss, as Lightning has it: `loss_fn.pos_weight` is saved with the model, and moved with it."""

import torch
from torch import nn

import ckptmove


class Tagger(nn.Module):  # in your project: a LightningModule
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
        self.loss_fn = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0, 1.0, 0.5]))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return self.loss_fn(self.net(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def case(device, *, mended=True):
    module = Tagger().to(device)
    batch = torch.randn(8, 10), torch.randint(2, (8, 3)).float()

    def step(batch):
        if mended:
            batch = [one.to(device) for one in batch]
        return module.training_step(batch, 0)

    return ckptmove.Case(module, module.configure_optimizers(), None, batch, step)


def broken(device):
    return case(device, mended=False)
