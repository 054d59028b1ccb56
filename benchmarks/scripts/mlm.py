"""Masked language modelling: a tokenizer's dict of tensors as batch, masking on the device."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

VOCAB, HIDDEN, MASK_ID = 40, 16, 4


def tokenize(count, length=8):
    """Encode sentences as a tokenizer does, padded to one length."""
    for i in range(count):
        input_ids = torch.randint(5, VOCAB, (length,))
        attention_mask = (torch.arange(length) < length - i % 3).long()
        yield {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}


class BertForMaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, HIDDEN, padding_idx=0)
        self.position_embeddings = nn.Embedding(16, HIDDEN)
        self.register_buffer("position_ids", torch.arange(16).expand((1, -1)))
        self.layer = nn.TransformerEncoderLayer(HIDDEN, 2, 32, batch_first=True, norm_first=True)
        self.decoder = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids, attention_mask, labels=None):
        positions = self.position_ids[:, : input_ids.size(1)]
        x = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        x = self.layer(x, src_key_padding_mask=attention_mask == 0)
        logits = self.decoder(x)
        loss = nn.functional.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def mask_tokens(input_ids, device):
    labels = input_ids.clone()
    probability = torch.full(labels.shape, 0.3, device=device)
    probability.masked_fill_(labels < 5, 0.0)
    masked_indices = torch.bernoulli(probability).bool()
    masked_indices[:, 1] = True
    labels[~masked_indices] = -100
    replace = torch.rand(labels.shape, device=device) < 0.8
    input_ids = torch.where(masked_indices & replace, torch.tensor(MASK_ID, device=device), input_ids)
    return input_ids, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", dest="resume_from_checkpoint")
    parser.add_argument("--save", dest="output")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(12)
    device = torch.device(args.device)
    train_dataloader = DataLoader(list(tokenize(8)), batch_size=4)
    model = BertForMaskedLM()
    model.to(device)
    no_decay = ["bias", "norm"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-5)
    if args.resume_from_checkpoint:
        checkpoint = torch.load(args.resume_from_checkpoint, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    model.train()
    for batch in train_dataloader:
        batch = {k: v.to(device) for k, v in batch.items()}
        batch["input_ids"], batch["labels"] = mask_tokens(batch["input_ids"], device)
        outputs = model(**batch)
        loss = outputs["loss"]
        loss.backward()
        logits = outputs["logits"].detach().cpu().numpy()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f}, logits {logits.std():.3f}")
    if args.output:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.output)


if __name__ == "__main__":
    main()
