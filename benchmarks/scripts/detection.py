"""Object detection: a list of images, targets as a list of dicts, anchors, a dict of losses."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Boxes(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        corner = torch.rand(2, 2, generator=generator) * 8
        boxes = torch.cat([corner, corner + 6], dim=1)
        labels = torch.randint(1, 3, (2,), generator=generator)
        return torch.rand(3, 16, 16, generator=generator), {"boxes": boxes, "labels": labels}


def collate_fn(batch):
    return tuple(zip(*batch))


def box_iou(a, b):
    area_a, area_b = ((x[:, 2:] - x[:, :2]).prod(1) for x in (a, b))
    inter = (torch.min(a[:, None, 2:], b[:, 2:]) - torch.max(a[:, None, :2], b[:, :2])).clamp(min=0).prod(2)
    return inter / (area_a[:, None] + area_b - inter)


class Detector(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU())
        self.cls_head = nn.Conv2d(8, num_classes, 1)
        self.box_head = nn.Conv2d(8, 4, 1)
        self.register_buffer("pixel_mean", torch.tensor([0.5, 0.5, 0.5]).view(3, 1, 1))

    def grid_anchors(self, features):
        shift = torch.arange(0, 16, 4, device=features.device)
        y, x = torch.meshgrid(shift, shift, indexing="ij")
        return torch.stack([x, y, x + 6, y + 6], dim=-1).view(-1, 4).float()

    def forward(self, images, targets):
        features = self.backbone(torch.stack([image - self.pixel_mean for image in images]))
        logits = self.cls_head(features).flatten(2).transpose(1, 2)
        deltas = self.box_head(features).flatten(2).transpose(1, 2)
        anchors = self.grid_anchors(features)
        losses = {"classification": 0.0, "bbox_regression": 0.0}
        for target, logit, delta in zip(targets, logits, deltas):
            quality, match = box_iou(anchors, target["boxes"]).max(dim=1)
            labels = torch.where(quality > 0.2, target["labels"][match], 0)
            losses["classification"] += F.cross_entropy(logit, labels)
            losses["bbox_regression"] += F.smooth_l1_loss(anchors + delta, target["boxes"][match])
        return losses


def train_one_epoch(model, optimizer, data_loader, device):
    model.train()
    for images, targets in data_loader:
        images = [image.to(device) for image in images]
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        print(", ".join(f"{k} {v.item():.3f}" for k, v in loss_dict.items()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="", type=str)
    parser.add_argument("--save", default="", type=str)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=str)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    data_loader = DataLoader(Boxes(), batch_size=4, collate_fn=collate_fn)
    model = Detector()
    model.to(device)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.005, momentum=0.9, weight_decay=5e-4)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    train_one_epoch(model, optimizer, data_loader, device)
    if args.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
