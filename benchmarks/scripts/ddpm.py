"""Denoising diffusion: noise schedule in buffers, noise and timesteps drawn for each batch."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


def extract(a, t, x_shape):
    return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(x_shape) - 1)))


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, time):
        half_dim = self.dim // 2
        emb = torch.exp(torch.arange(half_dim, device=time.device) * -(math.log(10000) / (half_dim - 1)))
        emb = time[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class Unet(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.time_mlp = nn.Sequential(SinusoidalPosEmb(dim), nn.Linear(dim, dim), nn.GELU())
        self.init_conv = nn.Conv2d(1, dim, 3, padding=1)
        self.final_conv = nn.Conv2d(dim, 1, 1)

    def forward(self, x, time):
        t = self.time_mlp(time)[:, :, None, None]
        return self.final_conv(F.silu(self.init_conv(x) + t))


class GaussianDiffusion(nn.Module):
    def __init__(self, model, timesteps=20):
        super().__init__()
        self.model, self.num_timesteps = model, timesteps
        betas = torch.linspace(1e-4, 0.02, timesteps)
        alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
        self.register_buffer("sqrt_alphas_cumprod", torch.sqrt(alphas_cumprod))
        self.register_buffer("sqrt_one_minus_alphas_cumprod", torch.sqrt(1.0 - alphas_cumprod))

    def q_sample(self, x_start, t, noise):
        mean = extract(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start
        return mean + extract(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise

    def forward(self, img, t, noise):
        return F.mse_loss(self.model(self.q_sample(img, t, noise), t), noise)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(6)
    device = torch.device(args.device)
    diffusion = GaussianDiffusion(Unet()).to(device)
    opt = torch.optim.Adam(diffusion.parameters(), lr=8e-5, betas=(0.9, 0.99))
    generator = torch.Generator(device=device).manual_seed(6)
    step = 0
    if args.resume:
        data = torch.load(args.resume, map_location=device)
        diffusion.load_state_dict(data["model"])
        opt.load_state_dict(data["opt"])
        step = data["step"]
    for _ in range(2):
        img = torch.rand(4, 1, 8, 8)
        img = img.to(device) * 2 - 1
        noise = torch.randn(img.shape, generator=generator, device=device)
        t = torch.randint(0, diffusion.num_timesteps, (img.shape[0],), device=device).long()
        loss = diffusion(img, t, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        step += 1
        print(f"{step}: loss {loss.item():.4f}")
    if args.save:
        torch.save({"step": step, "model": diffusion.state_dict(), "opt": opt.state_dict()}, args.save)


if __name__ == "__main__":
    main()
