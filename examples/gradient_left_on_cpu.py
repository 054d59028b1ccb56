"""A function with a `backward` of its own: what it returns there has to be where its input is."""

import torch
from torch import nn

import ckptmove


class Rounded(torch.autograd.Function):
    """Rounds, and lets the gradient pass where the values were within bounds."""

    @staticmethod
    def forward(ctx, values):
        ctx.save_for_backward(values)
        return values.round()

    @staticmethod
    def backward(ctx, grad):
        (values,) = ctx.saved_tensors
        return grad * (values.abs() <= 1)


class RoundedOnCpu(Rounded):
    @staticmethod
    def backward(ctx, grad):
        (values,) = ctx.saved_tensors
        return grad.cpu() * (values.cpu().abs() <= 1)


class Quantized(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.head = nn.Linear(4, 3)
        self.function = function

    def forward(self, inputs):
        return self.head(self.function.apply(self.linear(inputs)))


def case(device, function=Rounded):
    model = Quantized(function).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return ckptmove.Case(model, optimizer, nn.CrossEntropyLoss(), (torch.randn(6, 8), torch.randint(3, (6,))))


def broken(device):
    return case(device, RoundedOnCpu)
