"""Digits with a small convolutional network: train and test functions, StepLR, loader options for CUDA."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 8, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(8 * 12 * 12 // 4, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.fc(torch.flatten(self.dropout(x), 1))
        return F.log_softmax(x, dim=1)


def test(model, device, test_loader):
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (
                output.argmax(dim=1, keepdim=True).eq(target.view_as(output.argmax(dim=1, keepdim=True))).sum().item()
            )
    print(f"test: loss {test_loss / len(test_loader.dataset):.4f}, {correct} correct")


def train(args, model, device, train_loader, optimizer):
    model.train()
    running_loss = torch.zeros(1, device=device)
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        running_loss += loss.detach()
        optimizer.step()
        if batch_idx + 1 == args.steps:
            break
    print(f"train: loss {running_loss.item() / args.steps:.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device(args.device)
    loader_kwargs = {"batch_size": 8, "shuffle": True}
    if device.type == "cuda":
        loader_kwargs.update({"pin_memory": True})
    images, labels = torch.rand(64, 1, 16, 16), torch.randint(10, (64,))
    train_loader = DataLoader(TensorDataset(images, labels), **loader_kwargs)
    test_loader = DataLoader(TensorDataset(images[:16], labels[:16]), **loader_kwargs)

    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        test(model, device, test_loader)
    train(args, model, device, train_loader, optimizer)
    scheduler.step()
    if args.save:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(state, args.save)


if __name__ == "__main__":
    main()
