"""A module in Lightning's manner, which computes its own loss: `step` calls its `training_step`."""

import torch
from torch import nn

import ckptmove


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(3, 12, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(12, 1)

    def training_step(self, batch, batch_idx):
        series, target = batch
        states, _ = self.cells(series)
        return {"loss": nn.functional.mse_loss(self.head(states[:, -1]), target)}


def case(device):
    module = Forecaster().to(device)
    optimizer = torch.optim.NAdam(module.parameters(), lr=1e-3)

    def step(batch):
        return module.training_step([part.to(device) for part in batch], 0)

    return ckptmove.Case(module, optimizer, None, (torch.randn(5, 7, 3), torch.randn(5, 1)), step)


def broken(device):
    """The trainer that moves batches is not there, and nobody else moves them."""
    module = Forecaster().to(device)
    optimizer = torch.optim.NAdam(module.parameters(), lr=1e-3)
    batch = torch.randn(5, 7, 3), torch.randn(5, 1)
    return ckptmove.Case(module, optimizer, None, batch, lambda batch: module.training_step(batch, 0))
