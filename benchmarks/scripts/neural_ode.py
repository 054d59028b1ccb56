"""A neural ODE on a spiral: Runge-Kutta steps through the network, batches of starts from one trajectory."""

import argparse

import torch
from torch import nn

DATA_SIZE, BATCH_TIME, BATCH_SIZE = 40, 5, 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Lambda(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("true_A", torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]))

    def forward(self, t, y):
        return torch.mm(y**3, self.true_A)


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)

    def forward(self, t, y):
        return self.net(y**3)


def odeint(func, y0, t):
    ys = [y0]
    for t0, t1 in zip(t[:-1], t[1:]):
        h, y = t1 - t0, ys[-1]
        k1 = func(t0, y)
        k2 = func(t0 + h / 2, y + h * k1 / 2)
        k3 = func(t0 + h / 2, y + h * k2 / 2)
        k4 = func(t1, y + h * k3)
        ys.append(y + h * (k1 + 2 * k2 + 2 * k3 + k4) / 6)
    return torch.stack(ys)


def get_batch(t, true_y, device):
    s = torch.randperm(DATA_SIZE - BATCH_TIME, device=device)[:BATCH_SIZE]
    return true_y[s], t[:BATCH_TIME], torch.stack([true_y[s + i] for i in range(BATCH_TIME)], dim=0)


def main():
    parser = argparse.ArgumentParser("ODE demo")
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default=DEVICE)
    args = parser.parse_args()
    torch.manual_seed(14)
    device = torch.device(args.device)
    true_y0 = torch.tensor([[2.0, 0.0]]).to(device)
    t = torch.linspace(0.0, 2.0, DATA_SIZE, device=device)
    teacher = Lambda().to(device)
    with torch.no_grad():
        true_y = odeint(teacher, true_y0, t)[:, 0]
    func = ODEFunc().to(device)
    optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-3)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        func.load_state_dict(checkpoint["func"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    loss_meter = torch.zeros(1, device=device)
    for itr in range(2):
        optimizer.zero_grad()
        batch_y0, batch_t, batch_y = get_batch(t, true_y, device)
        pred_y = odeint(func, batch_y0, batch_t)
        loss = torch.mean(torch.abs(pred_y - batch_y))
        loss.backward()
        loss_meter = 0.9 * loss_meter + 0.1 * loss.detach()
        trajectory = pred_y.detach().cpu().numpy()
        optimizer.step()
        print(f"{itr}: loss {loss_meter.item():.5f}, at {trajectory[-1, 0].round(2)}")
    if args.save:
        torch.save({"func": func.state_dict(), "optimizer": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
