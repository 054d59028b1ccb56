"""`pos_weight` is a buffer of the loss, and the loss is no part of the model: it has to be moved by itself."""

import torch
from torch import nn

import ckptmove


def case(device, *, mended=True):
    model = nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0, 1.0, 0.5]))
    if mended:
        criterion = criterion.to(device)
    inputs, labels = torch.randn(8, 10), torch.randint(2, (8, 3)).float()
    return ckptmove.Case(model, optimizer, criterion, (inputs, labels))


def broken(device):
    return case(device, mended=False)
