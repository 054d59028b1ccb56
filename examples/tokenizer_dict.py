"""A tokenizer's dict, moved key by key, with one key forgotten; the model returns its loss, as those of HF do."""

import torch
from torch import nn

import ckptmove


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask, labels):
        words = self.words(input_ids)
        mixed, _ = self.attention(words, words, words, key_padding_mask=attention_mask == 0)
        weights = attention_mask.unsqueeze(-1).float()
        logits = self.head((mixed * weights).sum(1) / weights.sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def tokenized():
    lengths = torch.randint(2, 7, (4, 1))
    return {
        "input_ids": torch.randint(40, (4, 6)),
        "attention_mask": (torch.arange(6) < lengths).long(),
        "labels": torch.randint(3, (4,)),
    }


def case(device):
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return ckptmove.Case(model, optimizer, None, tokenized())


def broken(device):
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch):
        batch["input_ids"] = batch["input_ids"].to(device)
        batch["labels"] = batch["labels"].to(device)
        return model(**batch)

    return ckptmove.Case(model, optimizer, None, tokenized(), step)
