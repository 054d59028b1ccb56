"""A loop in the style of the Hugging Face Trainer: arguments with a device, _prepare_inputs, accumulated loss."""

import argparse
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.utils.data import DataLoader


@dataclass
class TrainingArguments:
    device_name: str
    max_steps: int = 2
    learning_rate: float = 5e-4
    label_names: tuple = ("labels",)

    @cached_property
    def device(self):
        return torch.device(self.device_name)


class SequenceClassifier(nn.Module):
    def __init__(self, vocab=50, dim=16, num_labels=3):
        super().__init__()
        self.num_labels = num_labels
        self.embeddings = nn.Embedding(vocab, dim)
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(dim, 2, 32, batch_first=True) for _ in range(2)])
        self.score = nn.Linear(dim, num_labels)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        hidden = self.embeddings(input_ids)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = hidden * (1 + 0.01 * positions.view(1, -1, 1))
        for layer in self.encoder:
            hidden = layer(hidden, src_key_padding_mask=~attention_mask.bool())
        last = attention_mask.sum(dim=1) - 1
        logits = self.score(hidden[torch.arange(len(last), device=hidden.device), last])
        return nn.functional.cross_entropy(logits, labels), logits


class Trainer:
    def __init__(self, model, args, train_dataset, data_collator):
        self.args, self.data_collator, self.train_dataset = args, data_collator, train_dataset
        self.model = model.to(args.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: max(0.0, 1 - step / 10))

    def _prepare_inputs(self, inputs):
        return {k: v.to(self.args.device) for k, v in inputs.items()}

    def compute_loss(self, inputs):
        loss, logits = self.model(**inputs)
        predictions = logits.detach().argmax(-1).cpu().numpy()
        print(f"accuracy {(predictions == inputs['labels'].cpu().numpy()).mean():.2f}")
        return loss

    def train(self, resume_from_checkpoint=None):
        if resume_from_checkpoint is not None:
            state = torch.load(resume_from_checkpoint, map_location=self.args.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.lr_scheduler.load_state_dict(state["scheduler"])
        tr_loss = torch.tensor(0.0, device=self.args.device)
        self.model.train()
        for inputs in DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator):
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(inputs)
            loss.backward()
            tr_loss += loss.detach()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.lr_scheduler.step()
            self.model.zero_grad()
        return tr_loss.item() / self.args.max_steps


def pad(features):
    longest = max(len(one["input_ids"]) for one in features)
    ids, mask = torch.zeros(len(features), longest, dtype=torch.long), torch.zeros(len(features), longest).long()
    for row, one in enumerate(features):
        ids[row, : len(one["input_ids"])] = torch.tensor(one["input_ids"])
        mask[row, : len(one["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([one["label"] for one in features])}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(42)
    dataset = [{"input_ids": list(range(2 + i, 6 + 2 * i)), "label": i % 3} for i in range(8)]
    trainer = Trainer(SequenceClassifier(), TrainingArguments(options.device), dataset, pad)
    print(f"loss {trainer.train(options.resume):.4f}")
    if options.save:
        parts = {"model": trainer.model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, options.save)


if __name__ == "__main__":
    main()
