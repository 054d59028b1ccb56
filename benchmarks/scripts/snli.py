"""Natural language inference: a bidirectional encoder over premise and hypothesis, batches with attributes."""

import argparse
import os

import torch
from torch import nn, optim


class Batch:
    """Two sentences and a label, as an iterator of torchtext yields them."""

    def __init__(self, premise, hypothesis, label):
        self.premise, self.hypothesis, self.label = premise, hypothesis, label

    def to(self, device):
        return Batch(self.premise.to(device), self.hypothesis.to(device), self.label.to(device))


def iterate(count, batch_size):
    for _ in range(count):
        premise, hypothesis = (torch.randint(40, (9, batch_size)) for _ in range(2))
        yield Batch(premise, hypothesis, torch.randint(3, (batch_size,)))


class Encoder(nn.Module):
    def __init__(self, d_embed, d_hidden):
        super().__init__()
        self.d_hidden = d_hidden
        self.rnn = nn.LSTM(d_embed, d_hidden, bidirectional=True)

    def forward(self, inputs):
        shape = 2, inputs.size(1), self.d_hidden
        h0 = c0 = torch.zeros(shape, device=inputs.device)
        _, (ht, _) = self.rnn(inputs, (h0, c0))
        return ht.transpose(0, 1).contiguous().view(inputs.size(1), -1)


class SNLIClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.projection = nn.Linear(8, 8)
        self.encoder = Encoder(8, 8)
        self.out = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, batch):
        prem_embed, hypo_embed = self.embed(batch.premise).detach(), self.embed(batch.hypothesis).detach()
        premise = self.encoder(torch.relu(self.projection(prem_embed)))
        hypothesis = self.encoder(torch.relu(self.projection(hypo_embed)))
        return self.out(torch.cat([premise, hypothesis], 1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="")
    parser.add_argument("--save", default="")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(2)
    device = torch.device(args.device)
    model = SNLIClassifier()
    model.embed.weight.requires_grad = False
    model.to(device)
    criterion = nn.CrossEntropyLoss()
    opt = optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    if args.resume and os.path.isfile(args.resume):
        snapshot = torch.load(args.resume, map_location=device)
        model.load_state_dict(snapshot["model"])
        opt.load_state_dict(snapshot["optimizer"])

    n_correct, n_total = torch.zeros(1, device=device), 0
    for batch in iterate(2, 6):
        batch = batch.to(device)
        model.train()
        opt.zero_grad()
        answer = model(batch)
        n_correct += (answer.argmax(1) == batch.label).sum()
        n_total += len(batch.label)
        loss = criterion(answer, batch.label)
        loss.backward()
        opt.step()
        print(f"loss {loss.item():.4f}, accuracy {100 * n_correct.item() / n_total:.1f}")
    if args.save:
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, args.save)


if __name__ == "__main__":
    main()
