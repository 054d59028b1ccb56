"""ImageNet style: AverageMeter, top-k accuracy, DataParallel keys, best_acc1, resume with an explicit location."""

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    def __str__(self):
        return f"{self.name} {float(self.sum) / max(self.count, 1):.3f}"


def small_resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def train(train_loader, model, criterion, optimizer, epoch, device):
    losses, top1, top5 = AverageMeter("Loss"), AverageMeter("Acc@1"), AverageMeter("Acc@5")
    model.train()
    end = time.time()
    for images, target in train_loader:
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0], images.size(0))
        top5.update(acc5[0], images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"Epoch {epoch} ({time.time() - end:.1f} s): {losses}, {top1}, {top5}")
    return float(top1.sum) / top1.count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="", type=str, metavar="PATH")
    parser.add_argument("--save", default="", type=str, metavar="PATH")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    model = nn.DataParallel(small_resnet())
    model = model.to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    start_epoch, best_acc1 = 0, 0.0
    if args.resume and os.path.isfile(args.resume):
        loc = f"cuda:{device.index or 0}" if device.type == "cuda" else args.device
        checkpoint = torch.load(args.resume, map_location=loc)
        start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"].to(device)
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"=> loaded checkpoint '{args.resume}' (epoch {start_epoch})")
    dataset = TensorDataset(torch.rand(16, 3, 16, 16), torch.randint(10, (16,)))
    train_loader = DataLoader(dataset, batch_size=8, shuffle=True, pin_memory=torch.cuda.is_available())
    acc1 = train(train_loader, model, criterion, optimizer, start_epoch, device)
    scheduler.step()
    best_acc1 = max(acc1, float(best_acc1))
    if args.save:
        state = {
            "epoch": start_epoch + 1,
            "state_dict": model.state_dict(),
            "best_acc1": torch.tensor(best_acc1),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        torch.save(state, args.save)


if __name__ == "__main__":
    main()
