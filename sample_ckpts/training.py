"""Train the models of the samples: tiny models and real `torch.optim` steps on seeded data.

Training is in float64, rounded once to float32, so the result does not depend on the processor: the last bit of a
float32 sum depends on the width of the vector unit, the upper half of a float64 does not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model and its optimizer after real steps, in float32 on the CPU."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: StepLR
    loss: float

    def weights(self, prefix: str = "") -> dict[str, Any]:
        """The model's `state_dict()`, with `prefix` before every key."""
        return self.model.state_dict(prefix=prefix)

    def state(self) -> dict[str, Any]:
        """The optimizer's `state_dict()`."""
        return self.optimizer.state_dict()


def perceptron() -> nn.Module:
    """Six features in, three out."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class TiedHead(nn.Module):
    """GPT's frame without its blocks: a token embedding whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        embedding = nn.Embedding(12, 6)
        self.transformer = nn.ModuleDict({"wte": embedding, "ln_f": nn.LayerNorm(6)})
        self.lm_head = nn.Linear(6, 12, bias=False)
        self.lm_head.weight = embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits over the twelve tokens."""
        return torch.as_tensor(self.lm_head(self.transformer["ln_f"](self.transformer["wte"](tokens))))


class Gate(nn.Module):
    """A layer and a line of code that makes its tensor on the first GPU.

    Without torch's own layers: the order in which their constants are written depends on the seed of Python's hashes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 3))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Three values."""
        return torch.tanh(torch.matmul(features, self.weight) + self.bias)

    @torch.jit.export
    def gates(self) -> torch.Tensor:
        """A gate for each value, all open."""
        return torch.ones(3, device=torch.device("cuda:0"))


def train(
    optimize: Callable[[nn.Module], Optimizer],
    *,
    seed: int,
    make: Callable[[], nn.Module] = perceptron,
    criterion: nn.Module | None = None,
) -> Trained:
    """Take three real optimizer steps on seeded data; in float64, rounded to float32 at the end."""
    torch.manual_seed(seed)
    model = make()
    optimizer = optimize(model)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    tokens = isinstance(model, TiedHead)
    measure = criterion or (nn.CrossEntropyLoss() if tokens else nn.MSELoss())
    loss = torch.zeros(())
    for _ in range(3):
        batch = torch.randint(12, (16,)) if tokens else torch.rand(16, 6)
        target = batch.roll(1) if tokens else torch.rand(16, 3)
        optimizer.zero_grad()
        loss = measure(model(batch), target)
        loss.backward()
        optimizer.step()
        scheduler.step()
    optimizer.zero_grad()
    model.float()
    for state in optimizer.state.values():
        state.update({name: held.float() for name, held in state.items() if isinstance(held, torch.Tensor)})
    return Trained(model=model, optimizer=optimizer, scheduler=scheduler, loss=round(loss.item(), 6))


def adam(model: nn.Module) -> Optimizer:
    """Adam as most scripts construct it."""
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def adamw(model: nn.Module) -> Optimizer:
    """AdamW as most scripts construct it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)


def rng_states(seed: int) -> dict[str, Any]:
    """RNG states of `random`, `torch` and one GPU (a CUDA generator's seed and offset, 8 bytes each)."""
    generator = torch.Generator().manual_seed(seed)
    cuda = seed.to_bytes(8, "little") + (4 * seed).to_bytes(8, "little")
    return {
        "python": random.Random(seed).getstate(),
        "torch": generator.get_state(),
        "cuda": [torch.tensor(list(cuda), dtype=torch.uint8)],
    }


def full_resume(run: Trained) -> dict[str, Any]:
    """Everything that an exact resume under mixed precision needs."""
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    return {
        "model": run.weights(),
        "optimizer": run.state(),
        "scheduler": run.scheduler.state_dict(),
        "scaler": {**scaler, "growth_interval": 2000, "_growth_tracker": 3},
        "epoch": 1,
        "global_step": 3,
        "rng": rng_states(11),
    }
