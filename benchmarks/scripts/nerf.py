"""A tiny radiance field: rays from a pose, positional encoding, volume rendering."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

HEIGHT = WIDTH = 8
N_SAMPLES, N_FREQS = 6, 3


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("freq_bands", 2.0 ** torch.arange(N_FREQS), persistent=False)

    def forward(self, x):
        angles = x[..., None] * self.freq_bands
        return torch.cat([x, angles.sin().flatten(-2), angles.cos().flatten(-2)], dim=-1)


class NeRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Embedder()
        self.mlp = nn.Sequential(nn.Linear(3 + 6 * N_FREQS, 24), nn.ReLU(), nn.Linear(24, 4))

    def forward(self, points):
        return self.mlp(self.embed(points))


def get_rays(pose, device):
    i, j = torch.meshgrid(
        torch.linspace(-1, 1, WIDTH, device=device), torch.linspace(-1, 1, HEIGHT, device=device), indexing="xy"
    )
    dirs = torch.stack([i, -j, -torch.ones_like(i)], -1)
    rays_d = torch.sum(dirs[..., None, :] * pose[:3, :3], -1)
    return pose[:3, -1].expand(rays_d.shape), rays_d


def render(model, rays_o, rays_d, device):
    z_vals = torch.linspace(2.0, 6.0, N_SAMPLES, device=device)
    z_vals = z_vals + torch.rand(rays_o.shape[0], N_SAMPLES, device=device) * 0.5
    raw = model(rays_o[:, None] + rays_d[:, None] * z_vals[..., None])
    sigma, rgb = F.relu(raw[..., 3]), torch.sigmoid(raw[..., :3])
    dists = torch.cat([z_vals[:, 1:] - z_vals[:, :-1], torch.tensor([1e3], device=device).expand(len(z_vals), 1)], -1)
    alpha = 1.0 - torch.exp(-sigma * dists)
    ones = torch.ones((len(alpha), 1), device=device)
    weights = alpha * torch.cumprod(torch.cat([ones, 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    return (weights[..., None] * rgb).sum(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", dest="ft_path")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(5)
    device = torch.device(args.device)
    model = NeRF().to(device)
    optimizer = torch.optim.RAdam(model.parameters(), lr=5e-4)
    if args.ft_path is not None:
        ckpt = torch.load(args.ft_path, map_location=device)
        model.load_state_dict(ckpt["network_fn_state_dict"])
        optimizer.load_state_dict(ckpt["optimizer_state_dict"])
    images, poses = torch.rand(3, HEIGHT, WIDTH, 3), torch.eye(4).repeat(3, 1, 1)
    images = images.to(device)
    poses = poses.to(device)
    for i in range(2):
        rays_o, rays_d = get_rays(poses[i], device)
        select_inds = torch.randperm(HEIGHT * WIDTH, device=device)[:16]
        rays_o, rays_d = rays_o.reshape(-1, 3)[select_inds], rays_d.reshape(-1, 3)[select_inds]
        target_s = images[i].reshape(-1, 3)[select_inds]
        rgb = render(model, rays_o, rays_d, device)
        loss = torch.mean((rgb - target_s) ** 2)
        psnr = -10.0 * torch.log(loss) / torch.log(torch.tensor([10.0], device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{i}: loss {loss.item():.4f}, PSNR {psnr.item():.2f}")
    if args.save:
        torch.save(
            {"network_fn_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, args.save
        )


if __name__ == "__main__":
    main()
