"""Saved from `nn.DataParallel`, resumed without it, and the reverse: keys with and without `module.` are matched."""

import torch
from torch import nn

import ckptmove


def plain(device):
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(8, 8), torch.randint(3, (8,))
    return ckptmove.Case(model, optimizer, nn.CrossEntropyLoss(), batch)


def wrapped(device):
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3)).to(device)
    model = nn.DataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(8, 8), torch.randint(3, (8,))
    return ckptmove.Case(model, optimizer, nn.CrossEntropyLoss(), batch)


def broken(device):
    """Another model under the wrapper: that is no matter of prefixes, and is named."""
    model = nn.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return ckptmove.Case(model, optimizer, nn.CrossEntropyLoss(), (torch.randn(8, 8), torch.randint(3, (8,))))
