"""Knowledge graph embeddings with TransE: corrupted triples, margin loss, ranks before training goes on."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ENTITIES, RELATIONS, DIM = 25, 4, 10


class TransE(nn.Module):
    def __init__(self, margin=1.0):
        super().__init__()
        self.entities_emb = nn.Embedding(ENTITIES + 1, DIM, padding_idx=ENTITIES)
        self.relations_emb = nn.Embedding(RELATIONS, DIM)
        self.criterion = nn.MarginRankingLoss(margin=margin, reduction="none")

    def _distance(self, triplets):
        heads, relations, tails = triplets.unbind(1)
        return (self.entities_emb(heads) + self.relations_emb(relations) - self.entities_emb(tails)).norm(p=1, dim=1)

    def forward(self, positive_triplets, negative_triplets):
        positive_distances = self._distance(positive_triplets)
        negative_distances = self._distance(negative_triplets)
        target = torch.tensor([-1], dtype=torch.long, device=positive_distances.device)
        return self.criterion(positive_distances, negative_distances, target)


def corrupt(triples, device):
    head_or_tail = torch.randint(2, (len(triples),), device=device)
    random_entities = torch.randint(ENTITIES, (len(triples),), device=device)
    broken_heads = torch.where(head_or_tail == 1, random_entities, triples[:, 0])
    broken_tails = torch.where(head_or_tail == 0, random_entities, triples[:, 2])
    return torch.stack((broken_heads, triples[:, 1], broken_tails), dim=1)


@torch.no_grad()
def mean_rank(model, triples, device):
    entity_ids = torch.arange(end=ENTITIES, device=device)
    ranks = []
    for head, relation, tail in triples:
        candidates = torch.stack([head.expand(ENTITIES), relation.expand(ENTITIES), entity_ids], dim=1)
        ranks.append(int((model._distance(candidates) < model._distance(candidates[tail : tail + 1])).sum()) + 1)
    return sum(ranks) / len(ranks)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(13)
    device = torch.device(args.device)
    columns = torch.randint(ENTITIES, (20,)), torch.randint(RELATIONS, (20,)), torch.randint(ENTITIES, (20,))
    train_generator = DataLoader(TensorDataset(*columns), batch_size=10)
    model = TransE()
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        print(f"mean rank {mean_rank(model, torch.stack(columns, 1)[:4].to(device), device):.1f}")
    for local_heads, local_relations, local_tails in train_generator:
        local_heads, local_relations = local_heads.to(device), local_relations.to(device)
        local_tails = local_tails.to(device)
        positive_triples = torch.stack((local_heads, local_relations, local_tails), dim=1)
        negative_triples = corrupt(positive_triples, device)
        optimizer.zero_grad()
        loss = model(positive_triples, negative_triples)
        loss.mean().backward()
        impact = (loss.detach() > 0).cpu().numpy().mean()
        optimizer.step()
        print(f"loss {loss.mean().item():.4f}, impact {impact:.2f}")
    if args.save:
        torch.save({"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
