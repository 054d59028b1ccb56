"""Adversarial training: projected gradient steps on the images, normalization inside the model."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Normalize(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, x):
        return (x - self.mean) / self.std


def attack_pgd(model, X, y, epsilon, alpha, iters, device):
    delta = torch.empty(X.shape, device=device).uniform_(-epsilon, epsilon)
    delta = torch.clamp(delta, 0 - X, 1 - X).requires_grad_()
    for _ in range(iters):
        loss = F.cross_entropy(model(X + delta), y)
        (grad,) = torch.autograd.grad(loss, delta)
        stepped = torch.clamp(delta + alpha * torch.sign(grad), -epsilon, epsilon)
        delta = torch.clamp(stepped, 0 - X, 1 - X).detach().requires_grad_()
    return delta.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epsilon", type=float, default=8 / 255)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    model = nn.Sequential(
        Normalize([0.49, 0.48, 0.44], [0.2, 0.2, 0.2]),
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 5),
    ).to(device)  # fmt: skip
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["model"])
        opt.load_state_dict(checkpoint["opt"])

    train_loss, robust = torch.zeros(1, device=device), 0
    for _ in range(2):
        X, y = torch.rand(6, 3, 8, 8), torch.randint(5, (6,))
        X, y = X.to(device), y.to(device)
        model.eval()
        delta = attack_pgd(model, X, y, args.epsilon, args.epsilon / 4, 2, device)
        model.train()
        output = model(X + delta)
        loss = F.cross_entropy(output, y, label_smoothing=0.1)
        opt.zero_grad()
        loss.backward()
        train_loss += loss.detach() * y.size(0)
        robust += (output.max(1)[1] == y).sum().item()
        perturbation = delta.abs().amax(dim=(1, 2, 3)).cpu().numpy()
        opt.step()
    print(f"loss {train_loss.item() / 12:.4f}, robust {robust} of 12, up to {perturbation.max():.4f}")
    if args.save:
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, args.save)


if __name__ == "__main__":
    main()
