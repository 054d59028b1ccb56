"""The optimizer is built before the model is moved.

Where something replaces the parameters (torch_xla, FSDP, a quantizer, a copy of the model), the optimizer goes on
stepping the old ones; where `model.to` keeps them, what was restored into the optimizer stays behind.
"""

import copy

import torch
from torch import nn

import ckptmove


def case(device):
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return ckptmove.Case(model, optimizer, nn.MSELoss(), (torch.randn(8, 10), torch.randn(8, 2)))


def broken(device):
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = copy.deepcopy(model).to(device)
    return ckptmove.Case(model, optimizer, nn.MSELoss(), (torch.randn(8, 10), torch.randn(8, 2)))


def broken_by_late_move(device):
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()

    def step(batch):  # the state is restored before the first batch, and the model is moved with the first batch
        inputs, targets = batch
        model.to(device)
        return criterion(model(inputs.to(device)), targets.to(device))

    return ckptmove.Case(model, optimizer, criterion, (torch.randn(8, 10), torch.randn(8, 2)), step)
