"""`forward` makes a tensor without `device=`: it is born on the CPU, wherever the model is."""

import torch
from torch import nn

import ckptmove


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.places = nn.Embedding(32, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 50)

    def forward(self, words):
        places = torch.arange(words.shape[1], device=words.device)
        return self.head(self.encoder(self.words(words) + self.places(places))).flatten(0, 1)


class ForgetfulReader(Reader):
    def forward(self, words):
        places = torch.arange(words.shape[1])
        return self.head(self.encoder(self.words(words) + self.places(places))).flatten(0, 1)


def case(device, kind=Reader):
    model = kind().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words = torch.randint(50, (4, 9))
    return ckptmove.Case(model, optimizer, nn.CrossEntropyLoss(), (words[:, :-1], words[:, 1:].flatten()))


def broken(device):
    return case(device, ForgetfulReader)
