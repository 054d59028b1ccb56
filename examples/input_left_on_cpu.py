"""The loop forgets to move the images: `model.to(device)` moves the model, and nothing else."""

import torch
from torch import nn

import ckptmove


def case(device, *, mended=True):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 5)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    batch = torch.rand(6, 3, 8, 8), torch.randint(5, (6,))

    def step(batch):
        images, labels = batch
        labels = labels.to(device)
        if mended:
            images = images.to(device)
        return criterion(model(images), labels)

    return ckptmove.Case(model, optimizer, criterion, batch, step)


def broken(device):
    return case(device, mended=False)
