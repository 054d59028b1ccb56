"""BYOL: an online network predicts the projections of its momentum encoder."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def mlp(dim, projection_size, hidden_size=24):
    return nn.Sequential(
        nn.Linear(dim, hidden_size),
        nn.BatchNorm1d(hidden_size),
        nn.ReLU(inplace=True),
        nn.Linear(hidden_size, projection_size),
    )


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projector = mlp(8, 12)
        self.register_buffer("pixel_mean", torch.tensor([0.48, 0.45, 0.4]).view(3, 1, 1))

    def forward(self, x):
        return self.projector(self.backbone(x - self.pixel_mean))


def loss_fn(x, y):
    return 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(dim=-1)


@torch.no_grad()
def update_moving_average(target, online, beta):
    for current, ma in zip(online.parameters(), target.parameters()):
        ma.data = ma.data * beta + (1 - beta) * current.data


def augment(images, device):
    noise = torch.rand(images.shape, device=device)
    flipped = torch.flip(images, dims=[-1])
    return (0.9 * images + 0.1 * noise), (0.9 * flipped + 0.1 * noise)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(9)
    device = torch.device(args.device)
    online_encoder = Encoder().to(device)
    target_encoder = Encoder().to(device)
    target_encoder.load_state_dict(online_encoder.state_dict())
    predictor = mlp(12, 12).to(device)
    optimizer = torch.optim.Adam([*online_encoder.parameters(), *predictor.parameters()], lr=3e-4)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        online_encoder.load_state_dict(checkpoint["online"])
        target_encoder.load_state_dict(checkpoint["target"])
        predictor.load_state_dict(checkpoint["predictor"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    for _ in range(2):
        images = torch.rand(6, 3, 8, 8).to(device)
        one, two = augment(images, device)
        pred_one, pred_two = predictor(online_encoder(one)), predictor(online_encoder(two))
        with torch.no_grad():
            proj_one, proj_two = target_encoder(one), target_encoder(two)
        loss = (loss_fn(pred_one, proj_two.detach()) + loss_fn(pred_two, proj_one.detach())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_moving_average(target_encoder, online_encoder, 0.99)
        print(f"loss {loss.item():.4f}")
    if args.save:
        parts = {"online": online_encoder, "target": target_encoder, "predictor": predictor, "optimizer": optimizer}
        torch.save({name: part.state_dict() for name, part in parts.items()}, args.save)


if __name__ == "__main__":
    main()
