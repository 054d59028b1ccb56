"""The recipe for automatic mixed precision: autocast, GradScaler, and clipping of unscaled gradients."""

import argparse

import torch
from torch import nn


def make_model(in_size, out_size, num_layers):
    layers = []
    for _ in range(num_layers - 1):
        layers += [nn.Linear(in_size, in_size), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(in_size, out_size))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = args.device
    use_amp = "cuda" in device
    batch_size, in_size, out_size = 8, 16, 4
    data = [torch.randn(batch_size, in_size) for _ in range(2)]
    targets = [torch.randn(batch_size, out_size) for _ in range(2)]

    net = make_model(in_size, out_size, 3).to(device)
    loss_fn = nn.MSELoss().to(device)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp, init_scale=256.0)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device, weights_only=True)
        net.load_state_dict(checkpoint["model"])
        opt.load_state_dict(checkpoint["optimizer"])
        if use_amp and checkpoint["scaler"]:
            scaler.load_state_dict(checkpoint["scaler"])

    norms = torch.zeros(len(data), device=device)
    for i, (input, target) in enumerate(zip(data, targets)):
        input, target = input.to(device), target.to(device)
        with torch.autocast(device_type="cuda" if use_amp else "cpu", dtype=torch.float16, enabled=use_amp):
            output = net(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norms[i] = torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
        predictions = output.detach().float().cpu().numpy()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    print(f"loss {loss.item():.4f}, norm {norms.mean().item():.4f}, mean {predictions.mean():.3f}")
    if args.save:
        torch.save({"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()}, args.save)


if __name__ == "__main__":
    main()
