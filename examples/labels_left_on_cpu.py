"""The loop moves the inputs and forgets the labels, which only the loss needs."""

import torch
from torch import nn

import ckptmove


def case(device, *, mended=True):
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    batch = torch.randn(8, 12), torch.randint(4, (8,))

    def step(batch):
        inputs, labels = batch
        logits = model(inputs.to(device))
        if mended:
            labels = labels.to(device)
        return criterion(logits, labels)

    return ckptmove.Case(model, optimizer, criterion, batch, step)


def broken(device):
    return case(device, mended=False)
