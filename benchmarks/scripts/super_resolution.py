"""Super resolution with sub-pixel convolution; PSNR is computed before each update."""

import argparse
from math import log10

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="super resolution")
parser.add_argument("--upscale_factor", type=int, default=2)
parser.add_argument("--resume", default="")
parser.add_argument("--save", default="")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 8, 5, padding=2)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.conv3 = nn.Conv2d(8, upscale_factor**2, 3, padding=1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        self.register_buffer("mean", torch.tensor([0.45]).view(1, 1, 1, 1))
        for conv in (self.conv1, self.conv2):
            nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))

    def forward(self, x):
        x = self.relu(self.conv1(x - self.mean))
        x = self.relu(self.conv2(x))
        return self.pixel_shuffle(self.conv3(x))


def main():
    opt = parser.parse_args()
    torch.manual_seed(123)
    device = torch.device(opt.device)
    high = torch.rand(8, 1, 16, 16)
    low = nn.functional.avg_pool2d(high, opt.upscale_factor)
    training_data_loader = DataLoader(TensorDataset(low, high), batch_size=4, shuffle=True)
    model = Net(upscale_factor=opt.upscale_factor).to(device)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    start_epoch = 1
    if opt.resume:
        checkpoint = torch.load(opt.resume, map_location=lambda storage, _location: storage)
        start_epoch = checkpoint["epoch"] + 1
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    epoch_loss, avg_psnr = 0, 0
    for batch in training_data_loader:
        input, target = batch[0].to(device), batch[1].to(device)
        optimizer.zero_grad()
        prediction = model(input)
        loss = criterion(prediction, target)
        epoch_loss += loss.item()
        avg_psnr += 10 * log10(1 / loss.item())
        loss.backward()
        optimizer.step()
    count = len(training_data_loader)
    print(f"epoch {start_epoch}: loss {epoch_loss / count:.4f}, PSNR {avg_psnr / count:.4f} dB")
    if opt.save:
        torch.save({"epoch": start_epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, opt.save)


if __name__ == "__main__":
    main()
