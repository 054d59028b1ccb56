"""A siamese network that tells whether two images show the same digit."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, count):
        self.images = torch.rand(count, 1, 12, 12)
        self.classes = torch.randint(3, (count,))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        other = (index * 7 + 3) % len(self)
        same = (self.classes[index] == self.classes[other]).float()
        return self.images[index], self.images[other], same


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(5), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))

    def forward(self, input1, input2):
        output = torch.cat((self.features(input1), self.features(input2)), 1)
        return self.fc(output).squeeze(1)


def train(model, device, train_loader, optimizer, criterion):
    model.train()
    correct = torch.tensor(0, device=device)
    for images_1, images_2, targets in train_loader:
        images_1, images_2, targets = images_1.to(device), images_2.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = model(images_1, images_2)
        loss = criterion(outputs, targets)
        loss.backward()
        correct += (outputs > 0).eq(targets > 0.5).sum()
        optimizer.step()
    print(f"loss {loss.item():.4f}, {correct.item()} correct")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(3)
    use_cuda = args.device.startswith("cuda")
    device = torch.device(args.device)
    train_loader = DataLoader(Pairs(32), batch_size=16, pin_memory=use_cuda)
    model = SiameseNetwork().to(device)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0], device=device))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    if args.resume:
        saved = torch.load(args.resume, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    train(model, device, train_loader, optimizer, criterion)
    if args.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
