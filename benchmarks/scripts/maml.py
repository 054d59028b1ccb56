"""Meta-learning of sine waves: inner steps with functional_call, one outer step over the tasks."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call


class Sines:
    """Tasks of random amplitude and phase, drawn on the CPU."""

    def __init__(self, shots):
        self.shots = shots

    def __iter__(self):
        for _ in range(3):
            amplitude, phase = 0.1 + 4.9 * torch.rand(1), math.pi * torch.rand(1)
            x = torch.rand(2, self.shots, 1) * 10 - 5
            yield x, amplitude * torch.sin(x + phase)


def net():
    return nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def inner_loop(model, x, y, lr, steps):
    params = dict(model.named_parameters())
    for _ in range(steps):
        loss = F.mse_loss(functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(loss, params.values(), create_graph=True)
        params = {name: p - lr * g for (name, p), g in zip(params.items(), grads)}
    return params


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(17)
    device = torch.device(args.device)
    model = net().to(device)
    meta_opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["meta_model"])
        meta_opt.load_state_dict(checkpoint["meta_opt"])

    for iteration in range(2):
        meta_opt.zero_grad()
        meta_loss = torch.zeros(1, device=device)
        for x, y in Sines(shots=5):
            x, y = x.to(device), y.to(device)
            params = inner_loop(model, x[0], y[0], lr=0.01, steps=2)
            meta_loss = meta_loss + F.mse_loss(functional_call(model, params, (x[1],)), y[1])
        (meta_loss / 3).sum().backward()
        meta_opt.step()
        print(f"{iteration}: meta loss {meta_loss.item() / 3:.4f}")
    if args.save:
        torch.save({"meta_model": model.state_dict(), "meta_opt": meta_opt.state_dict()}, args.save)


if __name__ == "__main__":
    main()
