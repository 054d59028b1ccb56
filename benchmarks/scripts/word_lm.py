"""Word language model with an LSTM: truncated backpropagation with a hidden state that is carried along."""

import argparse
import math

import torch
from torch import nn

NTOKENS, NHID, NLAYERS, BPTT = 50, 16, 2, 7


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(NTOKENS, NHID)
        self.rnn = nn.LSTM(NHID, NHID, NLAYERS, dropout=0.2)
        self.decoder = nn.Linear(NHID, NTOKENS)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)).view(-1, NTOKENS), hidden


def batchify(data, bsz, device):
    nbatch = data.size(0) // bsz
    data = data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()
    return data.to(device)


def repackage_hidden(h):
    return tuple(v.detach() for v in h)


def get_batch(source, i):
    seq_len = min(BPTT, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def train(model, train_data, criterion, optimizer, device, steps):
    model.train()
    total_loss = 0.0
    hidden = (
        torch.zeros(NLAYERS, train_data.size(1), NHID, device=device),
        torch.zeros(NLAYERS, train_data.size(1), NHID, device=device),
    )
    for batch, i in enumerate(range(0, train_data.size(0) - 1, BPTT)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        total_loss += loss.item()
        if batch + 1 == steps:
            break
    print(f"ppl {math.exp(total_loss / steps):8.2f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default=None)
    parser.add_argument("--save", default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(1111)
    device = torch.device(args.device)
    train_data = batchify(torch.randint(NTOKENS, (400,)), 4, device)
    model = RNNModel().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if args.resume is not None:
        with open(args.resume, "rb") as f:
            checkpoint = torch.load(f, map_location=device)
        model.load_state_dict(checkpoint["model"])
        model.rnn.flatten_parameters()
        optimizer.load_state_dict(checkpoint["optimizer"])
    train(model, train_data, criterion, optimizer, device, steps=2)
    if args.save is not None:
        with open(args.save, "wb") as f:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f)


if __name__ == "__main__":
    main()
