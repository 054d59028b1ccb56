"""Part-of-speech tagging with packed sequences and lengths that stay on the CPU."""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader


class LSTMTagger(nn.Module):
    def __init__(self, embedding_dim, hidden_dim, vocab_size, tagset_size):
        super().__init__()
        self.hidden_dim = hidden_dim
        self.word_embeddings = nn.Embedding(vocab_size, embedding_dim, padding_idx=0)
        self.lstm = nn.LSTM(embedding_dim, hidden_dim, batch_first=True)
        self.hidden2tag = nn.Linear(hidden_dim, tagset_size)

    def init_hidden(self, batch_size, device):
        return (
            torch.zeros(1, batch_size, self.hidden_dim, device=device),
            torch.zeros(1, batch_size, self.hidden_dim, device=device),
        )

    def forward(self, sentence, lengths):
        packed = pack_padded_sequence(
            self.word_embeddings(sentence), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        lstm_out, _ = self.lstm(packed, self.init_hidden(len(sentence), sentence.device))
        lstm_out, _ = pad_packed_sequence(lstm_out, batch_first=True)
        return self.hidden2tag(lstm_out)


def collate(rows):
    sentences, tags = zip(*rows)
    lengths = torch.tensor([len(s) for s in sentences])
    return pad_sequence(sentences, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=-1), lengths


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device(args.device)
    rows = [(torch.randint(1, 30, (3 + i % 4,)), torch.randint(5, (3 + i % 4,))) for i in range(12)]
    loader = DataLoader(rows, batch_size=6, collate_fn=collate)
    model = LSTMTagger(8, 10, 30, 5).to(device)
    loss_function = nn.CrossEntropyLoss(ignore_index=-1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    if args.resume:
        state = torch.load(args.resume, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    hits, total = torch.zeros(1, device=device), 0
    for sentence, tags, lengths in loader:
        sentence, tags, lengths = sentence.to(device), tags.to(device), lengths.to(device)
        optimizer.zero_grad()
        tag_scores = model(sentence, lengths)
        loss = loss_function(tag_scores.flatten(0, 1), tags.flatten())
        loss.backward()
        hits += (tag_scores.argmax(-1) == tags).sum()
        total += int(lengths.sum())
        optimizer.step()
    print(f"loss {loss.item():.4f}, accuracy {hits.item() / total:.3f}")
    if args.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
