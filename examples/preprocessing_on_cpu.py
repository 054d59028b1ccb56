"""Images are normalized on the device, with a mean and a deviation that were left on the CPU."""

import torch
from torch import nn

import ckptmove

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def normalized(images):
    return (images - MEAN) / STD


def normalized_there(images):
    return (images - MEAN.to(images.device)) / STD.to(images.device)


def case(device, preprocess=normalized_there):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def step(batch):
        images, labels = (part.to(device) for part in batch)
        return criterion(model(preprocess(images)), labels)

    return ckptmove.Case(model, optimizer, criterion, (torch.rand(6, 3, 8, 8), torch.randint(5, (6,))), step)


def broken(device):
    return case(device, normalized)
