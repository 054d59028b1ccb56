"""A DCGAN: generator and discriminator with an optimizer each, labels and noise made in the loop."""

import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

NZ = 8


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NZ, 8, 4, 1, 0, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4, bias=False), nn.Sigmoid()
        )

    def forward(self, images):
        return self.main(images).view(-1, 1).squeeze(1)


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="")
    parser.add_argument("--save", default="")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    opt = parser.parse_args()
    torch.manual_seed(7)
    device = torch.device(opt.device)
    dataset = TensorDataset(torch.rand(16, 3, 8, 8) * 2 - 1, torch.zeros(16))
    dataloader = DataLoader(dataset, batch_size=8, shuffle=True)

    netG = Generator().to(device)
    netG.apply(weights_init)
    netD = Discriminator().to(device)
    netD.apply(weights_init)
    criterion = nn.BCELoss()
    optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    if opt.resume != "":
        state = torch.load(opt.resume, map_location=device)
        netG.load_state_dict(state["netG"])
        netD.load_state_dict(state["netD"])
        optimizerG.load_state_dict(state["optimizerG"])
        optimizerD.load_state_dict(state["optimizerD"])

    for data in dataloader:
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real_cpu = data[0].to(device)
        batch_size = real_cpu.size(0)
        label = torch.full((batch_size,), 1.0, dtype=real_cpu.dtype, device=device)
        errD_real = criterion(netD(real_cpu), label)
        errD_real.backward()
        noise = torch.randn(batch_size, NZ, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()
        # (2) Update G: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
        print(f"Loss_D {errD_real.item() + errD_fake.item():.4f} Loss_G {errG.item():.4f}")

    if opt.save != "":
        parts = {"netG": netG, "netD": netD, "optimizerG": optimizerG, "optimizerD": optimizerD}
        torch.save({name: part.state_dict() for name, part in parts.items()}, opt.save)


if __name__ == "__main__":
    main()
