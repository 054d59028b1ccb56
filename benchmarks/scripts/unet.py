"""Segmentation with a U-Net: class weights, dice term, confusion matrix, channels_last, RMSprop."""

import argparse
import logging

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader


class DoubleConv(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )


class UNet(nn.Module):
    def __init__(self, n_channels, n_classes):
        super().__init__()
        self.n_classes = n_classes
        self.inc, self.down = DoubleConv(n_channels, 6), DoubleConv(6, 12)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.conv, self.outc = DoubleConv(12, 6), nn.Conv2d(6, n_classes, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.up(self.down(F.max_pool2d(x1, 2)))
        return self.outc(self.conv(torch.cat([x1, x2], dim=1)))


def dice_loss(probs, target):
    inter = 2 * (probs * target).sum()
    return 1 - (inter + 1e-6) / (probs.sum() + target.sum() + 1e-6)


def train_model(model, optimizer, grad_scaler, train_loader, device, amp):
    class_weights = torch.tensor([0.5, 1.0, 2.0], device=device)
    criterion = nn.CrossEntropyLoss(weight=class_weights)
    confusion = torch.zeros(model.n_classes**2, dtype=torch.long, device=device)
    model.train()
    for batch in train_loader:
        images, true_masks = batch["image"], batch["mask"]
        images = images.to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
        true_masks = true_masks.to(device=device, dtype=torch.long)
        with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=amp):
            masks_pred = model(images)
            loss = criterion(masks_pred, true_masks)
            one_hot = F.one_hot(true_masks, model.n_classes).permute(0, 3, 1, 2).float()
            loss += dice_loss(F.softmax(masks_pred, dim=1).float(), one_hot)
        pairs = true_masks.flatten() * model.n_classes + masks_pred.argmax(dim=1).flatten()
        confusion += torch.bincount(pairs, minlength=model.n_classes**2)
        optimizer.zero_grad(set_to_none=True)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        logging.info("loss %.4f", loss.item())
    logging.info("accuracy %.3f", confusion.view(3, 3).diag().sum().item() / confusion.sum().item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", type=str, default=False)
    parser.add_argument("--save", type=str, default=False)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--amp", action="store_true", default=False)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    torch.manual_seed(0)
    device = torch.device(args.device)
    logging.info("Using device %s", device)
    model = UNet(n_channels=3, n_classes=3)
    model = model.to(memory_format=torch.channels_last)
    model.to(device=device)
    optimizer = optim.RMSprop(model.parameters(), lr=1e-4, weight_decay=1e-8, momentum=0.9, foreach=True)
    grad_scaler = torch.amp.GradScaler(device.type, enabled=args.amp)
    if args.resume:
        state_dict = torch.load(args.resume, map_location=device)
        model.load_state_dict(state_dict["model"])
        optimizer.load_state_dict(state_dict["optimizer"])
    rows = [{"image": torch.rand(3, 16, 16), "mask": torch.randint(3, (16, 16))} for _ in range(8)]
    loader = DataLoader(rows, batch_size=4, shuffle=True, pin_memory=device.type == "cuda")
    train_model(model, optimizer, grad_scaler, loader, device, args.amp)
    if args.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
