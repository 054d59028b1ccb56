"""Stochastic weight averaging with torch.optim.swa_utils."""

import argparse

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset


def build():
    return nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", type=str)
    parser.add_argument("--save", type=str)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(4)
    device = torch.device(args.device)
    loader = DataLoader(TensorDataset(torch.randn(32, 10), torch.randn(32, 1)), batch_size=16, shuffle=True)
    model = build().to(device)
    swa_model = AveragedModel(model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    loss_fn = nn.HuberLoss()
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["model"])
        swa_model.load_state_dict(checkpoint["swa_model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        swa_scheduler.load_state_dict(checkpoint["swa_scheduler"])
        update_bn(loader, swa_model, device=device)
        swa_model.eval()
        with torch.no_grad():
            probe = swa_model(torch.zeros(1, 10, device=device))
        print(f"average at zero: {probe.item():.4f}")

    epoch_loss = torch.zeros((), device=device)
    for input, target in loader:
        input, target = input.to(device), target.to(device)
        optimizer.zero_grad()
        loss = loss_fn(model(input), target)
        loss.backward()
        epoch_loss += loss.detach() * input.size(0)
        optimizer.step()
    swa_model.update_parameters(model)
    swa_scheduler.step()
    print(f"loss {epoch_loss.item() / 32:.4f}")
    if args.save:
        parts = {"model": model, "swa_model": swa_model, "optimizer": optimizer, "swa_scheduler": swa_scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, args.save)


if __name__ == "__main__":
    main()
