"""A normalizing flow with affine couplings on a two-dimensional density."""

import argparse
import math

import torch
from torch import nn


class Coupling(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        masked = x * self.mask
        s, t = self.net(masked).chunk(2, dim=1)
        s = torch.tanh(s) * (1 - self.mask)
        z = masked + (1 - self.mask) * (x * torch.exp(s) + t)
        return z, s.sum(dim=1)


class RealNVP(nn.Module):
    def __init__(self, layers):
        super().__init__()
        masks = [torch.tensor([1.0, 0.0]) if i % 2 else torch.tensor([0.0, 1.0]) for i in range(layers)]
        self.log_scale = nn.Parameter(torch.zeros(2))
        self.couplings = nn.ModuleList([Coupling(mask) for mask in masks])

    def log_prob(self, x):
        log_det = torch.zeros(x.size(0), device=x.device) + self.log_scale.sum()
        x = x * self.log_scale.exp()
        for coupling in self.couplings:
            x, ld = coupling(x)
            log_det = log_det + ld
        return -0.5 * (x.pow(2).sum(1) + 2 * math.log(2 * math.pi)) + log_det


def two_moons(n, generator, device):
    angle = torch.rand(n, generator=generator, device=device) * math.pi
    upper = torch.randint(2, (n,), generator=generator, device=device)
    x = torch.stack([torch.cos(angle) + upper, torch.sin(angle) * (1 - 2 * upper)], dim=1)
    return x + 0.05 * torch.randn(n, 2, generator=generator, device=device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(8)
    device = torch.device(args.device)
    generator = torch.Generator(device=device)
    generator.manual_seed(8)
    flow = RealNVP(4)
    flow.to(device)
    optimizer = torch.optim.Adamax(flow.parameters(), lr=1e-3)
    if args.resume:
        saved = torch.load(args.resume, map_location=device)
        flow.load_state_dict(saved["flow"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(2):
        x = two_moons(32, generator, device)
        loss = -flow.log_prob(x).mean()
        optimizer.zero_grad()
        loss.backward()
        points = x.detach().cpu().numpy()
        optimizer.step()
        print(f"{step}: nll {loss.item():.4f} around {points.mean(axis=0).round(2)}")
    if args.save:
        torch.save({"flow": flow.state_dict(), "optimizer": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
