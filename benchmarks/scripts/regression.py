"""Regression of a polynomial with a single linear layer, as a flat script."""

import argparse
from itertools import count

import torch
import torch.nn.functional as F

POLY_DEGREE = 4


def make_features(x):
    """Build a matrix with the columns [x, x^2, x^3, x^4]."""
    x = x.unsqueeze(1)
    return torch.cat([x**i for i in range(1, POLY_DEGREE + 1)], 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(5)
    device = args.device
    W_target = torch.randn(POLY_DEGREE, 1, device=device) * 5
    b_target = torch.randn(1, device=device) * 5

    fc = torch.nn.Linear(W_target.size(0), 1).to(device)
    optimizer = torch.optim.SGD(fc.parameters(), lr=1e-3, momentum=0.9)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        fc.load_state_dict(checkpoint["fc"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        with torch.no_grad():
            W_target.copy_(checkpoint["W_target"])
            b_target.copy_(checkpoint["b_target"])

    for batch_idx in count(1):
        random = torch.randn(8)
        batch_x = make_features(random).to(device)
        batch_y = batch_x.mm(W_target) + b_target.item()
        fc.zero_grad()
        output = F.smooth_l1_loss(fc(batch_x), batch_y)
        output.backward()
        optimizer.step()
        if batch_idx == 2:
            break
    print(f"loss {output.item():.6f} after {batch_idx} batches")
    if args.save:
        state = {"fc": fc.state_dict(), "optimizer": optimizer.state_dict(), "W_target": W_target, "b_target": b_target}
        torch.save(state, args.save)


if __name__ == "__main__":
    main()
