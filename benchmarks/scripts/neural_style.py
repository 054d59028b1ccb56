"""Fast neural style: a transformer network trained against the features of a frozen network."""

import argparse

import torch
from torch import nn
from torch.optim import Adam


class Features(nn.Module):
    """Stands for the first layers of a VGG."""

    def __init__(self):
        super().__init__()
        self.slice1 = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.slice2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        for param in self.parameters():
            param.requires_grad = False

    def forward(self, x):
        h1 = self.slice1(x)
        return [h1, self.slice2(h1)]


class TransformerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.pad = nn.ReflectionPad2d(1)
        self.blocks = nn.ModuleList([nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 3, 3)])
        self.norm = nn.InstanceNorm2d(6, affine=True)

    def forward(self, x):
        y = torch.relu(self.norm(self.blocks[0](self.pad(x))))
        y = torch.relu(self.norm(self.blocks[1](self.pad(y))))
        return self.blocks[2](self.pad(y))


def gram_matrix(y):
    b, ch, h, w = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


def normalize_batch(batch):
    mean = torch.tensor([0.485, 0.456, 0.406], device=batch.device).view(-1, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], device=batch.device).view(-1, 1, 1)
    return (batch.div(255.0) - mean) / std


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(42)
    device = torch.device(args.device)
    transformer = TransformerNet().to(device)
    optimizer = Adam(transformer.parameters(), 1e-3)
    mse_loss = nn.MSELoss()
    vgg = Features().to(device)
    if args.resume:
        ckpt = torch.load(args.resume, map_location=device)
        transformer.load_state_dict(ckpt["transformer"])
        optimizer.load_state_dict(ckpt["optimizer"])
    style = (torch.rand(1, 3, 16, 16) * 255).repeat(2, 1, 1, 1).to(device)
    gram_style = [gram_matrix(y) for y in vgg(normalize_batch(style))]

    for batch_id in range(2):
        optimizer.zero_grad()
        x = torch.rand(2, 3, 16, 16).mul(255)
        x = x.to(device)
        y = transformer(x)
        features_y, features_x = vgg(normalize_batch(y)), vgg(normalize_batch(x))
        content_loss = 1e3 * mse_loss(features_y[1], features_x[1])
        style_loss = 0.0
        for ft_y, gm_s in zip(features_y, gram_style):
            style_loss += mse_loss(gram_matrix(ft_y), gm_s)
        total_loss = content_loss + 1e4 * style_loss
        total_loss.backward()
        preview = y[0].detach().clamp(0, 255).cpu().numpy().transpose(1, 2, 0).astype("uint8")
        optimizer.step()
        print(f"{batch_id}: total {total_loss.item():.4f}, preview mean {preview.mean():.1f}")
    if args.save:
        torch.save({"transformer": transformer.state_dict(), "optimizer": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
