"""Sets of points on rings, and a small network whose points attend to each other, for experiments on derivatives.

All points of a set lie on one ring with a random center, which a network that does not mix points cannot infer.
"""

from __future__ import annotations

from collections.abc import Callable

import cuflash.torch
import torch

RADIUS = 0.7


def rings(num_sets: int, num_points: int, generator: torch.Generator) -> torch.Tensor:
    """Return sets of points [num_sets, num_points, 2] on rings with random centers."""
    centers = torch.randn(num_sets, 1, 2, generator=generator)
    angles = 2 * torch.pi * torch.rand(num_sets, num_points, generator=generator)
    return centers + RADIUS * torch.stack([angles.cos(), angles.sin()], -1)


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute attention by PyTorch's operations, which store the weight matrix."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


ATTENTIONS: dict[str, Callable[..., torch.Tensor]] = {"cuflash": cuflash.torch.attention, "naive": naive}


class Layer(torch.nn.Module):
    """Attention between the points of a set, and a network for each point."""

    def __init__(self, width: int, heads: int, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.LayerNorm(width), torch.nn.Linear(width, 2 * width), torch.nn.SiLU(),
            torch.nn.Linear(2 * width, width),
        )  # fmt: skip
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of the same shape [num_sets, num_points, width]."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class Network(torch.nn.Module):
    """A function of sets and of numbers per set, such as times; it returns `outputs` numbers per point."""

    def __init__(self, attention: str, *, width: int, heads: int, layers: int, numbers: int, outputs: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2 + 2 * numbers, width)
        self.layers = torch.nn.Sequential(*(Layer(width, heads, ATTENTIONS[attention]) for _ in range(layers)))
        self.last = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, outputs))

    def forward(self, x: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
        """Return [num_sets, num_points, outputs]."""
        each = [number[:, None, None].expand(-1, x.shape[1], 1) for number in numbers]
        return self.last(self.layers(self.first(torch.cat([x, *each, *(3 * number.cos() for number in each)], -1))))


def energy_distance(first: torch.Tensor, other: torch.Tensor) -> float:
    """Return the energy distance between the distributions of pairs of points of a set; 0 if they are equal."""
    pairs = [torch.cat([sets[:, :8], sets[:, 8:16]], -1).flatten(0, 1) for sets in (first, other)]
    (a, b), mean = pairs, lambda x, y: float(torch.cdist(x, y).mean())
    return 2 * mean(a, b) - mean(a, a) - mean(b, b)
