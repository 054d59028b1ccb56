"""A tensor that a module keeps as a plain attribute: `model.to(device)` and `state_dict()` do not know it."""

import torch
from torch import nn

import ckptmove


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        scale = torch.linspace(0.5, 1.5, 6)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, inputs):
        return self.linear(inputs) * self.scale


class Forgotten(Scaled):
    def __init__(self):
        super().__init__()
        del self.scale
        self.scale = torch.linspace(0.5, 1.5, 6)


def case(device, kind=Scaled):
    model = nn.Sequential(kind(), nn.ReLU(), nn.Linear(6, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return ckptmove.Case(model, optimizer, nn.MSELoss(), (torch.randn(8, 6), torch.randn(8, 2)))


def broken(device):
    return case(device, Forgotten)
