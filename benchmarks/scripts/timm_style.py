"""A train script in the style of timm: mixup, soft targets, model EMA, cosine schedule, channels_last."""

import argparse
from contextlib import suppress
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import nn


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.99):
        super().__init__()
        self.module = deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x, target):
        return torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1).mean()


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dw = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm = nn.GroupNorm(1, dim)
        self.gamma = nn.Parameter(1e-2 * torch.ones(dim, 1, 1))

    def forward(self, x):
        keep = torch.empty((x.shape[0], 1, 1, 1), device=x.device).bernoulli_(0.9)
        return x + keep * self.gamma * F.gelu(self.norm(self.dw(x)))


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.stages = nn.ModuleList([Block(8), Block(8)])
        self.head = nn.Linear(8, num_classes)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean([-2, -1]))


def mixup(x, target, num_classes, device, lam=0.7):
    perm = torch.randperm(x.size(0), device=device)
    y1 = F.one_hot(target, num_classes).float()
    return x * lam + x[perm] * (1 - lam), y1 * lam + y1[perm] * (1 - lam)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="", metavar="PATH")
    parser.add_argument("--save", default="", metavar="PATH")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(42)
    device = torch.device(args.device)
    model = Net(num_classes=5)
    model.to(device=device, memory_format=torch.channels_last)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    amp_autocast = suppress
    if device.type == "cuda":
        amp_autocast = lambda: torch.autocast("cuda", dtype=torch.bfloat16)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    model_ema = ModelEma(model, decay=0.9)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        model_ema.module.load_state_dict(checkpoint["state_dict_ema"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
    train_loss_fn = SoftTargetCrossEntropy().to(device=device)
    for batch_idx in range(2):
        input, target = torch.rand(4, 3, 16, 16), torch.randint(5, (4,))
        input, target = input.to(device), target.to(device)
        input, target = mixup(input, target, 5, device)
        input = input.contiguous(memory_format=torch.channels_last)
        with amp_autocast():
            output = model(input)
            loss = train_loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model_ema.update(model)
        print(f"{batch_idx}: loss {loss.item():.4f}")
    lr_scheduler.step()
    if args.save:
        state = {"state_dict": model.state_dict(), "state_dict_ema": model_ema.module.state_dict()}
        state |= {"optimizer": optimizer.state_dict(), "lr_scheduler": lr_scheduler.state_dict()}
        torch.save(state, args.save)


if __name__ == "__main__":
    main()
