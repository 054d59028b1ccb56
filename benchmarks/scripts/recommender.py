"""Matrix factorization with sparse embeddings: SparseAdam for the tables, Adam for the dense part."""

import argparse

import torch
from torch import nn

USERS, ITEMS, DIM = 30, 40, 8


class MatrixFactorization(nn.Module):
    def __init__(self):
        super().__init__()
        self.user_factors = nn.Embedding(USERS, DIM, sparse=True)
        self.item_factors = nn.Embedding(ITEMS, DIM, sparse=True)
        self.head = nn.Linear(DIM, 1)
        self.register_buffer("global_mean", torch.tensor([3.5]))

    def forward(self, user, item):
        product = self.user_factors(user) * self.item_factors(item)
        return self.global_mean + self.head(product).squeeze(1)


def sample_negatives(count, device):
    return torch.randint(ITEMS, (count,), device=device)


def hit_rate(model, users, positives, device):
    candidates = torch.arange(ITEMS, device=device)
    scores = torch.stack([model(user.expand(ITEMS), candidates) for user in users])
    return (scores.argmax(1) == positives).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(10)
    device = torch.device(args.device)
    model = MatrixFactorization().to(device)
    sparse_optimizer = torch.optim.SparseAdam([model.user_factors.weight, model.item_factors.weight], lr=1e-2)
    dense_optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["model"])
        sparse_optimizer.load_state_dict(checkpoint["sparse"])
        dense_optimizer.load_state_dict(checkpoint["dense"])

    for step in range(2):
        users, items, ratings = torch.randint(USERS, (16,)), torch.randint(ITEMS, (16,)), torch.rand(16) * 5
        users, items = users.to(device), items.to(device)
        ratings = ratings.to(device)
        if step == 0:
            with torch.no_grad():
                print(f"hit rate {hit_rate(model, users[:4], items[:4], device):.2f}")
        negative = model(users, sample_negatives(len(users), device))
        loss = (model(users, items) - ratings).pow(2).mean() + torch.relu(negative - ratings).mean()
        sparse_optimizer.zero_grad()
        dense_optimizer.zero_grad()
        loss.backward()
        sparse_optimizer.step()
        dense_optimizer.step()
        print(f"{step}: loss {loss.item():.4f}")
    if args.save:
        state = {
            "model": model.state_dict(),
            "sparse": sparse_optimizer.state_dict(),
            "dense": dense_optimizer.state_dict(),
        }
        torch.save(state, args.save)


if __name__ == "__main__":
    main()
