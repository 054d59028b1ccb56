"""Node classification with a graph convolution; the graph is one object with masks."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Data:
    """A graph with node features, edges, labels and masks, as torch_geometric's."""

    def __init__(self, **fields):
        vars(self).update(fields)

    def to(self, device):
        return Data(**{name: value.to(device) for name, value in vars(self).items()})


def karate(nodes=12, features=6, classes=3):
    edge_index = torch.randint(nodes, (2, 40))
    masks = torch.arange(nodes) % 2 == 0
    x, y = torch.rand(nodes, features), torch.randint(classes, (nodes,))
    return Data(x=x, y=y, edge_index=edge_index, train_mask=masks, test_mask=~masks)


class GCNConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x, edge_index):
        row, col = edge_index
        deg = torch.zeros(x.size(0), device=x.device).scatter_add_(0, col, torch.ones_like(col, dtype=x.dtype))
        norm = deg.clamp(min=1).pow(-0.5)
        out = torch.zeros(x.size(0), self.bias.numel(), device=x.device)
        out = out.index_add(0, col, self.lin(x)[row] * (norm[row] * norm[col]).unsqueeze(-1))
        return out + self.bias


class GCN(nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(in_channels, hidden_channels), GCNConv(hidden_channels, out_channels)])

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.convs[0](x, edge_index).relu()
        return self.convs[1](x, edge_index)


@torch.no_grad()
def test(model, data):
    model.eval()
    pred = model(data.x, data.edge_index).argmax(dim=-1)
    return int((pred[data.test_mask] == data.y[data.test_mask]).sum()) / int(data.test_mask.sum())


def train(model, data, optimizer):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return float(loss)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    data = karate()
    data = data.to(device)
    model = GCN(6, 8, 3).to(device)
    optimizer = torch.optim.Adam(
        [{"params": model.convs[0].parameters(), "weight_decay": 5e-4}, {"params": model.convs[1].parameters()}],
        lr=0.01,
    )
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["model_state"])
        optimizer.load_state_dict(checkpoint["optimizer_state"])
        print(f"test accuracy {test(model, data):.3f}")
    for epoch in range(2):
        print(f"epoch {epoch}: loss {train(model, data, optimizer):.4f}")
    if args.save:
        torch.save({"model_state": model.state_dict(), "optimizer_state": optimizer.state_dict()}, args.save)


if __name__ == "__main__":
    main()
