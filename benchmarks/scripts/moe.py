"""A mixture of experts with top-k routing and a term that balances the load."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class MoE(nn.Module):
    def __init__(self, dim, num_experts, k):
        super().__init__()
        self.num_experts, self.k = num_experts, k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, dim)) for _ in range(num_experts)]
        )

    def forward(self, x):
        logits = self.gate(x)
        if self.training:
            logits = logits + torch.randn(logits.shape, device=x.device) / self.num_experts
        weights, chosen = torch.topk(F.softmax(logits, dim=-1), self.k, dim=-1)
        out = torch.zeros(x.shape, device=x.device)
        load = torch.zeros(self.num_experts, device=x.device)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            if len(token):
                out = out.index_add(0, token, weights[token, place, None] * expert(x[token]))
            load[i] = len(token)
        importance = F.softmax(logits, dim=-1).mean(0)
        return out, self.num_experts * (importance * load / load.sum()).sum()


class Model(nn.Module):
    def __init__(self, dim=8, classes=4):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.moe = MoE(dim, num_experts=4, k=2)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        y, aux = self.moe(self.norm(x))
        return self.head(x + y), aux


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(16)
    if args.device.startswith("cuda"):
        torch.cuda.manual_seed_all(16)
    model = Model().to(args.device)
    weight = torch.tensor([1.0, 0.5, 2.0, 1.0]).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=args.device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    model.train()
    for step in range(2):
        tokens, labels = torch.randn(24, 8), torch.randint(4, (24,))
        tokens = tokens.to(args.device)
        labels = labels.to(args.device)
        logits, aux = model(tokens)
        loss = F.cross_entropy(logits, labels, weight=weight) + 1e-2 * aux
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(f"{step}: loss {loss.item():.4f}, balance {aux.item():.3f}")
    if args.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
