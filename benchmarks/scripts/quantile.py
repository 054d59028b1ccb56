"""Quantile regression of a time series with pinball loss; the quantiles are a tensor."""

import argparse

import torch
from torch import nn


class PinballLoss(nn.Module):
    def __init__(self, quantiles):
        super().__init__()
        self.register_buffer("quantiles", torch.tensor(quantiles))

    def forward(self, preds, target):
        errors = target.unsqueeze(1) - preds
        return torch.maximum((self.quantiles - 1) * errors, self.quantiles * errors).sum(1).mean()


class Forecaster(nn.Module):
    def __init__(self, window, n_quantiles):
        super().__init__()
        self.gru = nn.GRU(1, 8, batch_first=True)
        self.out = nn.Linear(8, n_quantiles)

    def forward(self, x):
        h0 = torch.zeros(1, x.shape[0], 8, device=x.device)
        _, h = self.gru(x.unsqueeze(-1), h0)
        return self.out(h[-1])


def windows(series, window):
    rows = series.unfold(0, window + 1, 1)
    return rows[:, :-1], rows[:, -1]


def coverage(preds, target):
    return ((target >= preds[:, 0]) & (target <= preds[:, -1])).float().mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(31)
    device = torch.device(args.device)
    series = torch.sin(torch.arange(60) / 4.0) + 0.1 * torch.randn(60)
    x, y = windows(series, window=10)
    x, y = x.to(device), y.to(device)
    model = Forecaster(10, 3).to(device)
    criterion = PinballLoss([0.1, 0.5, 0.9]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = torch.zeros(2, device=device)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    for epoch in range(2):
        permutation = torch.randperm(len(x), device=device)
        for rows in permutation.split(25):
            preds = model(x[rows])
            loss = criterion(preds, y[rows])
            optimizer.zero_grad()
            loss.backward()
            history[epoch] += coverage(preds.detach(), y[rows])
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}, coverage {history[epoch].item() / 2:.2f}")
    if args.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
