"""The naive family: standard attention, a baseline that stores the whole matrices of scores."""

from __future__ import annotations

import numpy as np

from ...blocks.work_list import ListedWork, WorkList
from ..device import DeviceSpec
from ..launches import MATRICES, Feature, Kernels, Pass, TileOrder, Workspace, structure
from ..problem import Problem
from ..sinks import sink_backward, sink_forward
from ..spec import NAIVE, Entry, KernelSpec
from .family import Family, Request, key_tiles, launch_of, num_tiles

SCORE_MATRICES = structure((MATRICES, "scores", "score_gradients"))
_SIDE = 32  # rows and columns of a tile, and columns that are multiplied at a time


def _row_bytes(spec: KernelSpec, width: int) -> int:
    """Return the bytes of a row of a tile in shared memory, including 16 bytes of padding."""
    return width * spec.accumulator.itemsize + 16


def _score_bytes(spec: KernelSpec) -> int:
    """Return the bytes of a query tile and a key tile."""
    return (spec.block_q + spec.block_kv) * _row_bytes(spec, spec.head_dim)


def _sum_bytes(spec: KernelSpec) -> int:
    """Return the bytes of a score tile and a tile of weighted rows, with an int per row: whether the row counts."""
    return spec.block_q * _row_bytes(spec, spec.block_kv) + spec.block_kv * (_row_bytes(spec, spec.head_dim) + 4)


_FORWARD = (
    Entry(family=NAIVE, name="scores", shared_bytes=_score_bytes, applies_score=True, products=(1, 0)),
    Entry(family=NAIVE, name="softmax", draws_dropout=True, has_exponentials=True),
    Entry(family=NAIVE, name="output", shared_bytes=_sum_bytes, products=(0, 1)),
)
_BACKWARD = (
    Entry(
        family=NAIVE, name="gradient_scores", shared_bytes=_score_bytes, applies_score=True,
        adds_gradients=True, draws_dropout=True, products=(0, 1),
    ),
    Entry(family=NAIVE, name="gradient_queries", shared_bytes=_sum_bytes, products=(1, 0)),
    Entry(
        family=NAIVE, name="gradient_keys", shared_bytes=_sum_bytes, holds_keys=True,
        products=(1, 1),
    ),
)  # fmt: skip


class Naive(Family):
    """Six kernels of standard attention, which compute and store all scores, whatever the mask."""

    name = NAIVE
    dtypes = (np.dtype(np.float16), np.dtype(np.float32))
    operands = ("sink", "dropout_seed")

    def list_block(self, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
        return _SIDE, _SIDE

    def specs(self, request: Request) -> dict[str, KernelSpec]:
        """Return kernels with one tile size for all chips and dimensions, halved if a list's blocks are smaller."""
        side = _SIDE if request.largest is None or min(request.largest) >= _SIDE else _SIDE // 2
        return {
            entry.name: KernelSpec(
                entry=entry, dtype=request.problem.dtype, head_dim=_SIDE, value_dim=_SIDE, block_q=side, block_kv=side
            )
            for entry in (*_FORWARD, *_BACKWARD)
        }

    def launches(self, request: Request, work: WorkList) -> Kernels:
        problem, chosen = request.problem, self.specs(request)
        columns = key_tiles(problem, work, chosen["scores"].block_kv)
        head_tiles, value_tiles = (-(-dim // _SIDE) for dim in (problem.head_dim, problem.value_dim))
        # For each kernel: output tiles per tile of rows, and the arrays that it reads and writes.
        uses = {
            "scores": (columns, ("q", "k"), ("scores",)),
            "softmax": (1, ("scores",), ("scores", "lse")),
            "output": (value_tiles, ("scores", "v"), ("o",)),
            "gradient_scores": (
                columns, ("scores", "v", "o", "lse", "do", "dlse"), ("scores", "score_gradients"),
            ),
            "gradient_queries": (head_tiles, ("score_gradients", "k"), ("dq",)),
            "gradient_keys": (
                head_tiles + value_tiles, ("scores", "score_gradients", "q", "lse", "do"), ("dk", "dv"),
            ),
        }  # fmt: skip
        launches = {
            role: launch_of(
                chosen[role], request.device, num_tiles(chosen[role], problem, work) * tiles, reads, writes,
                ("matrices",),
            )
            for role, (tiles, reads, writes) in uses.items()
        }  # fmt: skip
        features = (Feature("matrices", SCORE_MATRICES),)
        matrix = Workspace((*problem.lse_shape(), problem.seqlen_kv), problem.accumulator)
        num_heads = problem.num_batch_heads if isinstance(work, ListedWork) else 1
        forward = Pass({entry.name: launches[entry.name] for entry in _FORWARD}, {"scores": matrix}, features)
        backward = Pass(
            {entry.name: launches[entry.name] for entry in (_FORWARD[0], *_BACKWARD)},
            {"scores": matrix, "score_gradients": matrix},
            features,
        )
        return Kernels(
            forward=sink_forward(forward, problem, "softmax"),
            backward=sink_backward(backward, problem, chosen["softmax"], ("do",)),
            order=TileOrder(num_heads, num_heads),
        )
