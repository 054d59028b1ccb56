"""A plain training loop: a classifier of images, saved with `torch.save` and resumed by `--case`."""

import torch
from torch import nn

import ckptmove


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(8 * 4 * 4, 5)

    def forward(self, images):
        return self.head(self.features(images).flatten(1))


def case(device):
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    batch = torch.rand(6, 3, 8, 8), torch.randint(5, (6,))

    def step(batch):
        images, labels = batch
        images, labels = images.to(device), labels.to(device)
        return criterion(model(images), labels)

    return ckptmove.Case(model, optimizer, criterion, batch, step)
