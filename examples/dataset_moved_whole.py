"""A dataset, and what is moved of it: a loader gives one batch at a time, and one batch is what has to fit."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptmove

IMAGES, LABELS = torch.rand(512, 1, 8, 8), torch.randint(10, (512,))


def model_for(device):
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)).to(device)


def case(device):
    model = model_for(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=16, shuffle=True)
    return ckptmove.Case(model, optimizer, nn.CrossEntropyLoss(), loader)  # asked for one batch, which is moved


def broken(device):
    model = model_for(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = TensorDataset(IMAGES, LABELS)
    return ckptmove.Case(model, optimizer, nn.CrossEntropyLoss(), dataset)


def moved_by_hand(device):
    model = model_for(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    images = IMAGES.to(device)

    def step(rows):
        return criterion(model(images[rows]), LABELS[rows].to(device))

    return ckptmove.Case(model, optimizer, criterion, torch.arange(16), step)
