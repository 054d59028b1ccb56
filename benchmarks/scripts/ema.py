"""Exponential moving average of the weights in a deep copy of the model, evaluated before training goes on."""

import argparse
import copy

import torch
from torch import nn


class EMA:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            if ema_v.dtype.is_floating_point:
                ema_v.mul_(self.decay).add_(model_v, alpha=1 - self.decay)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 6)
        self.register_buffer("scale", torch.full((1, 3, 1, 1), 0.5))

    def forward(self, x):
        x = torch.relu(self.bn(self.stem(x * self.scale)))
        return self.head(x.mean((2, 3)))


def evaluate(model, images, labels):
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(11)
    device = torch.device(args.device)
    model = ConvNet()
    model = model.to(device)
    ema = EMA(model, decay=0.99)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    if args.resume:
        ckpt = torch.load(args.resume, map_location=device)
        model.load_state_dict(ckpt["model"])
        ema.module.load_state_dict(ckpt["ema"])
        optimizer.load_state_dict(ckpt["optimizer"])

    model.train()
    for step in range(2):
        images, labels = torch.rand(6, 3, 8, 8), torch.randint(6, (6,))
        images, labels = images.to(device), labels.to(device)
        print(f"ema accuracy {evaluate(ema.module, images, labels):.2f}")
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        print(f"step {step}: loss {loss.item():.4f}")
    if args.save:
        torch.save(
            {"model": model.state_dict(), "ema": ema.module.state_dict(), "optimizer": optimizer.state_dict()},
            args.save,
        )


if __name__ == "__main__":
    main()
