"""Contrastive training of an image and a text tower with a learned temperature."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class TextTower(nn.Module):
    def __init__(self, vocab, width, context):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab, width)
        self.positional_embedding = nn.Parameter(torch.randn(context, width) * 0.01)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.register_buffer("attn_mask", torch.full((context, context), float("-inf")).triu(1), persistent=False)

    def forward(self, text):
        x = self.token_embedding(text) + self.positional_embedding
        x, _ = self.attention(x, x, x, attn_mask=self.attn_mask, need_weights=False)
        return x[torch.arange(x.shape[0], device=x.device), text.argmax(dim=-1)]


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(32, 16))
        self.text = TextTower(30, 16, 6)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        image_features = F.normalize(self.visual(image), dim=-1)
        text_features = F.normalize(self.text(text), dim=-1)
        return image_features, text_features, self.logit_scale.exp()


class ClipLoss(nn.Module):
    def forward(self, image_features, text_features, logit_scale):
        device = image_features.device
        logits_per_image = logit_scale * image_features @ text_features.T
        labels = torch.arange(logits_per_image.shape[0], device=device, dtype=torch.long)
        return (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_image.T, labels)) / 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    model = CLIP().to(device)
    exclude = [p for n, p in model.named_parameters() if p.ndim < 2 or "logit_scale" in n]
    include = [p for n, p in model.named_parameters() if not (p.ndim < 2 or "logit_scale" in n)]
    optimizer = torch.optim.AdamW(
        [{"params": exclude, "weight_decay": 0.0}, {"params": include, "weight_decay": 0.2}], lr=5e-4, eps=1e-6
    )
    loss = ClipLoss()
    if args.resume is not None:
        checkpoint = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    for _ in range(2):
        images, texts = torch.rand(5, 3, 8, 8), torch.randint(30, (5, 6))
        images = images.to(device=device, non_blocking=True)
        texts = texts.to(device=device, non_blocking=True)
        optimizer.zero_grad()
        image_features, text_features, logit_scale = model(images, texts)
        total_loss = loss(image_features, text_features, logit_scale)
        total_loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        print(f"loss {total_loss.item():.4f}, scale {logit_scale.item():.2f}")
    if args.save is not None:
        torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
