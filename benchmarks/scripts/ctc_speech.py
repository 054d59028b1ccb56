"""Speech recognition with CTC: padded spectrograms, lengths of inputs and targets, greedy decoding."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

CLASSES, FEATURES = 12, 8


def data_processing(rows):
    spectrograms, labels = zip(*rows)
    input_lengths = torch.tensor([len(one) // 2 for one in spectrograms])
    label_lengths = torch.tensor([len(one) for one in labels])
    padded = pad_sequence(spectrograms, batch_first=True).transpose(1, 2)
    return padded, pad_sequence(labels, batch_first=True), input_lengths, label_lengths


class SpeechRecognitionModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Conv1d(FEATURES, 16, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.birnn = nn.GRU(16, 8, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(16, CLASSES)
        self.register_buffer("window", torch.hann_window(FEATURES).view(1, -1, 1) + 0.1)

    def forward(self, x):
        x = F.gelu(self.norm(self.cnn(x * self.window)))
        x, _ = self.birnn(x.transpose(1, 2))
        return self.classifier(x)


def greedy_decode(output):
    best = output.argmax(dim=2).cpu().numpy()
    return ["".join(chr(96 + i) for i in row if i) for row in best]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(7)
    device = torch.device(args.device)
    model = SpeechRecognitionModel().to(device)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-4, total_steps=10)
    if args.resume:
        package = torch.load(args.resume, map_location=device)
        model.load_state_dict(package["model"])
        optimizer.load_state_dict(package["optimizer"])
        scheduler.load_state_dict(package["scheduler"])
    model.train()
    for batch_idx in range(2):
        rows = [(torch.rand(20 + 2 * i, FEATURES), torch.randint(1, CLASSES, (4 + i,))) for i in range(4)]
        spectrograms, labels, input_lengths, label_lengths = data_processing(rows)
        spectrograms, labels = spectrograms.to(device), labels.to(device)
        optimizer.zero_grad()
        output = F.log_softmax(model(spectrograms), dim=2).transpose(0, 1)
        loss = criterion(output, labels, input_lengths, label_lengths)
        loss.backward()
        decoded = greedy_decode(output.transpose(0, 1))
        optimizer.step()
        scheduler.step()
        print(f"{batch_idx}: loss {loss.item():.4f}, {decoded[0]!r}")
    if args.save:
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, args.save)


if __name__ == "__main__":
    main()
