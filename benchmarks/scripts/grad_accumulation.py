"""Gradient accumulation over micro batches of a text classifier, with a loss that stays on the device."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

VOCAB, EMBED, CLASSES = 60, 12, 4


def collate_batch(rows):
    label_list, text_list, offsets = [], [], [0]
    for label, text in rows:
        label_list.append(label)
        text_list.append(text)
        offsets.append(text.size(0))
    return torch.tensor(label_list), torch.cat(text_list), torch.tensor(offsets[:-1]).cumsum(dim=0)


class TextClassificationModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(VOCAB, EMBED, sparse=False)
        self.norm = nn.LayerNorm(EMBED)
        self.fc = nn.Linear(EMBED, CLASSES)

    def forward(self, text, offsets):
        return self.fc(self.norm(self.embedding(text, offsets)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    rows = [(i % CLASSES, torch.randint(VOCAB, (3 + i % 5,))) for i in range(32)]
    dataloader = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate_batch)
    model = TextClassificationModel().to(device)
    weight = torch.tensor([1.0, 2.0, 1.0, 0.5], device=device)
    criterion = nn.CrossEntropyLoss(weight=weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=4)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        warmup.load_state_dict(checkpoint["warmup"])

    tr_loss = torch.tensor(0.0, device=device)
    model.train()
    for step, (label, text, offsets) in enumerate(dataloader, start=1):
        label, text, offsets = label.to(device), text.to(device), offsets.to(device)
        predicted_label = model(text, offsets)
        loss = criterion(predicted_label, label) / args.accumulate
        loss.backward()
        tr_loss += loss.detach()
        if step % args.accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            optimizer.zero_grad(set_to_none=True)
    print(f"loss {tr_loss.item():.4f}, lr {warmup.get_last_lr()[0]:.5f}")
    if args.save:
        parts = {"model": model, "optimizer": optimizer, "warmup": warmup}
        torch.save({name: part.state_dict() for name, part in parts.items()}, args.save)


if __name__ == "__main__":
    main()
