"""A loop in the style of accelerate: prepare() returns the objects on the device, batches are moved by the loader."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DeviceLoader:
    def __init__(self, dataloader, device):
        self.dataloader, self.device = dataloader, device

    def __iter__(self):
        for batch in self.dataloader:
            yield [tensor.to(self.device, non_blocking=True) for tensor in batch]


class Accelerator:
    def __init__(self, device, mixed_precision="no"):
        self.device = torch.device(device)
        self.native_amp = mixed_precision == "bf16" and self.device.type == "cuda"

    def prepare(self, model, optimizer, dataloader):
        model = model.to(self.device)
        return model, optimizer, DeviceLoader(dataloader, self.device)

    def autocast(self):
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.native_amp)

    def backward(self, loss):
        loss.backward()

    def gather_for_metrics(self, tensors):
        return [tensor.detach().float().cpu().numpy() for tensor in tensors]

    def load_state(self, path, **parts):
        state = torch.load(path, map_location=self.device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.layers = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 4)])
        self.register_buffer("temperature", torch.tensor([0.7]))

    def forward(self, x):
        x = nn.functional.silu(self.layers[0](self.norm(x)))
        return self.layers[1](x) / self.temperature


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", dest="resume_from_checkpoint")
    parser.add_argument("--save", dest="output_dir")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(2)
    accelerator = Accelerator(args.device, mixed_precision="bf16")
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(torch.randn(16, 12), torch.randint(4, (16,))), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint, model=model, optimizer=optimizer)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 2.0, 2.0], device=accelerator.device))
    total_loss = torch.zeros(1, device=accelerator.device)
    for step, (inputs, targets) in enumerate(loader):
        with accelerator.autocast():
            outputs = model(inputs)
        loss = criterion(outputs.float(), targets)
        total_loss += loss.detach()
        accelerator.backward(loss)
        (logits,) = accelerator.gather_for_metrics([outputs])
        optimizer.step()
        optimizer.zero_grad()
        print(f"{step}: loss {total_loss.item() / (step + 1):.4f}, spread {logits.std():.3f}")
    if args.output_dir:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.output_dir)


if __name__ == "__main__":
    main()
