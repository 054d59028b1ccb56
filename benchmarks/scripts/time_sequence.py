"""Prediction of sine waves with two LSTM cells and LBFGS, in double precision."""

import argparse

import numpy as np
import torch
from torch import nn, optim


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 6)
        self.lstm2 = nn.LSTMCell(6, 6)
        self.linear = nn.Linear(6, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t = torch.zeros(input.size(0), 6, dtype=torch.double, device=input.device)
        c_t = torch.zeros(input.size(0), 6, dtype=torch.double, device=input.device)
        h_t2, c_t2 = torch.zeros_like(h_t), torch.zeros_like(c_t)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            outputs += [self.linear(h_t2)]
        for _ in range(future):
            h_t, c_t = self.lstm1(outputs[-1], (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            outputs += [self.linear(h_t2)]
        return torch.cat(outputs, dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    opt = parser.parse_args()
    np.random.seed(0)
    torch.manual_seed(0)
    device = torch.device(opt.device)
    phase = np.arange(12)[None] + np.random.randint(-40, 40, 6)[:, None]
    data = np.sin(phase / 5.0)
    input = torch.from_numpy(data[3:, :-1]).to(device)
    target = torch.from_numpy(data[3:, 1:]).to(device)
    test_input = torch.from_numpy(data[:3, :-1]).to(device)

    seq = Sequence()
    seq.double()
    seq.to(device)
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=2)
    if opt.resume:
        state = torch.load(opt.resume, map_location=device)
        seq.load_state_dict(state["seq"])
        optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            pred = seq(test_input, future=3)
            y = pred.detach().cpu().numpy()
        print("future:", y[0, -3:])

    def closure():
        optimizer.zero_grad()
        loss = criterion(seq(input), target)
        loss.backward()
        return loss

    for _ in range(2):
        loss = optimizer.step(closure)
        print(f"loss {loss.item():.5f}")
    if opt.save:
        torch.save({"seq": seq.state_dict(), "optimizer": optimizer.state_dict()}, opt.save)


if __name__ == "__main__":
    main()
