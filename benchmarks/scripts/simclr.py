"""SimCLR: two augmented views, the NT-Xent loss with its mask of self-similarities."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class SimCLR:
    def __init__(self, model, optimizer, device, temperature=0.07, n_views=2):
        self.model, self.optimizer, self.device = model, optimizer, device
        self.temperature, self.n_views = temperature, n_views
        self.criterion = nn.CrossEntropyLoss().to(device)

    def info_nce_loss(self, features):
        batch_size = features.shape[0] // self.n_views
        labels = torch.cat([torch.arange(batch_size) for _ in range(self.n_views)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        labels = labels.to(self.device)
        features = F.normalize(features, dim=1)
        similarity_matrix = torch.matmul(features, features.T)
        mask = torch.eye(labels.shape[0], dtype=torch.bool, device=self.device)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
        positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1) / self.temperature
        zeros = torch.zeros(logits.shape[0], dtype=torch.long, device=self.device)
        return logits, zeros

    def train(self, loader):
        for images in loader:
            images = torch.cat(images, dim=0)
            images = images.to(self.device)
            features = self.model(images)
            logits, labels = self.info_nce_loss(features)
            loss = self.criterion(logits, labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            print(f"loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda") if args.device == "cuda" else torch.device(args.device)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-4, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    loader = [[torch.rand(6, 3, 8, 8), torch.rand(6, 3, 8, 8)] for _ in range(2)]
    SimCLR(model, optimizer, device).train(loader)
    scheduler.step()
    if args.save:
        state = {
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        torch.save(state, args.save)


if __name__ == "__main__":
    main()
