"""Depth, labels and normals with learned uncertainty weights; targets are a dict."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

TASKS = ("depth", "label", "normal")


class Scene:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        image = torch.rand(3, 8, 8)
        return image, {"depth": image.mean(0, keepdim=True), "label": (image[0] > 0.5).long(), "normal": image - 0.5}


class MultiTaskNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.heads = nn.ModuleDict(
            {"depth": nn.Conv2d(8, 1, 1), "label": nn.Conv2d(8, 2, 1), "normal": nn.Conv2d(8, 3, 1)}
        )

    def forward(self, x):
        features = self.trunk(x)
        return {task: head(features) for task, head in self.heads.items()}


class UncertaintyLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(len(TASKS)))
        self.register_buffer("label_weight", torch.tensor([1.0, 3.0]))

    def forward(self, pred, gt):
        losses = torch.stack([
            F.l1_loss(pred["depth"], gt["depth"]),
            F.cross_entropy(pred["label"], gt["label"], weight=self.label_weight),
            F.mse_loss(pred["normal"], gt["normal"]),
        ])  # fmt: skip
        return (losses * torch.exp(-self.log_vars) + self.log_vars).sum(), losses.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(21)
    device = torch.device(args.device)
    train_loader = DataLoader(Scene(), batch_size=4)
    model = MultiTaskNet().to(device)
    criterion = UncertaintyLoss().to(device)
    optimizer = torch.optim.AdamW(
        [{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 1e-2}], lr=1e-3
    )
    if args.resume:
        ckpt = torch.load(args.resume, map_location=device)
        model.load_state_dict(ckpt["model"])
        criterion.load_state_dict(ckpt["criterion"])
        optimizer.load_state_dict(ckpt["optimizer"])

    cost = torch.zeros(len(TASKS), device=device)
    for train_data, train_targets in train_loader:
        train_data = train_data.to(device)
        train_targets = {task: train_targets[task].to(device) for task in TASKS}
        train_pred = model(train_data)
        loss, parts = criterion(train_pred, train_targets)
        optimizer.zero_grad()
        loss.backward()
        cost += parts
        report = cost.cpu().numpy()
        optimizer.step()
        print(f"loss {loss.item():.4f}, tasks {report.round(3)}")
    if args.save:
        parts = {"model": model, "criterion": criterion, "optimizer": optimizer}
        torch.save({name: part.state_dict() for name, part in parts.items()}, args.save)


if __name__ == "__main__":
    main()
