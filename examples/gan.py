"""A GAN: two models and two optimizers in one file, stepped in turn by the body of its loop."""

import torch
from torch import nn

import ckptmove


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4, bias=False), nn.Sigmoid()
        )

    def forward(self, images):
        return self.main(images).view(-1)


def case(device, *, mended=True):
    netG = Generator().to(device)
    netD = Discriminator().to(device)
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def step(data):
        netD.zero_grad()
        real = data[0].to(device) if mended else data[0]
        label = torch.full((real.size(0),), 1.0, device=device)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        fake = netG(torch.randn(real.size(0), 6, 1, 1, device=device))
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
        return {"D": (errD_real + errD_fake).item(), "G": errG.item()}

    batch = torch.rand(4, 3, 8, 8) * 2 - 1, torch.zeros(4)
    models = {"netG": netG, "netD": netD}
    optimizers = {"optimizerG": optimizerG, "optimizerD": optimizerD}
    return ckptmove.Case(models, optimizers, criterion, batch, step)


def broken(device):
    return case(device, mended=False)
