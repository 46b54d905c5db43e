"""The naive family: standard attention, which makes and keeps whole matrices of scores; the baseline."""

from __future__ import annotations

import numpy as np

from ...blocks.work_list import ListedWork, WorkList
from ..device import DeviceSpec
from ..launches import Kernels, Launch, Pass, TileOrder, Workspace
from ..problem import Problem
from ..sinks import sink_backward, sink_forward
from ..spec import KernelSpec
from . import NAIVE
from .family import Family, key_tiles, list_block_of, query_tiles

_SIDE = 32  # rows and columns of a tile, which multiplies as many columns at a time
_FORWARD = ("scores", "softmax", "output")
_BACKWARD = ("scores", "gradient_scores", "gradient_queries", "gradient_keys")
_ARRAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # that kernels read and write
    "scores": (("q", "k"), ("scores",)),
    "softmax": (("scores",), ("scores", "lse")),
    "output": (("scores", "v"), ("o",)),
    "gradient_scores": (("scores", "v", "o", "lse", "do", "dlse"), ("scores", "score_gradients")),
    "gradient_queries": (("score_gradients", "k"), ("dq",)),
    "gradient_keys": (("scores", "score_gradients", "q", "lse", "do"), ("dk", "dv")),
}


class Naive(Family):
    """Six kernels of standard attention: every score is made and kept, whatever the mask."""

    name = NAIVE
    dtypes = (np.dtype(np.float16), np.dtype(np.float32))
    operands = ("sink", "dropout_seed")

    def list_block(self, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
        return _SIDE, _SIDE

    def specs(
        self,
        problem: Problem,
        device: DeviceSpec,
        largest: tuple[int, int] | None = None,
        *,
        deterministic: bool = False,
    ) -> dict[str, KernelSpec]:
        """One tile for all chips and dims, half as long where a list's blocks are shorter: a baseline is not tuned."""
        side = _SIDE if largest is None or min(largest) >= _SIDE else _SIDE // 2
        return {
            entry: KernelSpec(
                family=self.name, entry=entry, dtype=problem.dtype, head_dim=_SIDE, value_dim=_SIDE,
                block_q=side, block_kv=side,
            )
            for entry in (*_FORWARD, *_BACKWARD[1:])
        }  # fmt: skip

    def launches(
        self,
        problem: Problem,
        device: DeviceSpec,
        work: WorkList,
        *,
        deterministic: bool = False,
    ) -> Kernels:
        chosen = self.specs(problem, device, list_block_of(work))
        launches = {entry: self._launch(spec, problem, work) for entry, spec in chosen.items()}
        matrix = Workspace((*problem.lse_shape(), problem.seqlen_kv), problem.accumulator)
        num_heads = problem.num_batch_heads if isinstance(work, ListedWork) else 1
        forward = Pass({entry: launches[entry] for entry in _FORWARD}, {"scores": matrix})
        backward = Pass({entry: launches[entry] for entry in _BACKWARD}, {"scores": matrix, "score_gradients": matrix})
        return Kernels(
            forward=sink_forward(forward, problem, "softmax"),
            backward=sink_backward(backward, problem, chosen["softmax"], ("do",)),
            order=TileOrder(num_heads, num_heads),
        )

    def _launch(self, spec: KernelSpec, problem: Problem, work: WorkList) -> Launch:
        rows, columns = query_tiles(problem, work, spec.block_q), key_tiles(problem, work, spec.block_kv)
        head_tiles, value_tiles = -(-problem.head_dim // spec.head_dim), -(-problem.value_dim // spec.value_dim)
        tiles = {
            "scores": problem.num_heads * rows * columns,
            "softmax": problem.num_heads * rows,
            "output": problem.num_heads * rows * value_tiles,
            "gradient_scores": problem.num_heads * rows * columns,
            "gradient_queries": problem.num_heads * rows * head_tiles,
            "gradient_keys": problem.num_kv_heads * columns * (head_tiles + value_tiles),
        }
        reads, writes = _ARRAYS[spec.entry]
        shared_bytes = self.shared_bytes(spec)
        return Launch(spec=spec, tiles=tiles[spec.entry], shared_bytes=shared_bytes, reads=reads, writes=writes)

    def shared_bytes(self, spec: KernelSpec) -> int:
        """Two padded tiles, and an int for each row of the second that says whether it is multiplied."""
        itemsize = spec.accumulator.itemsize
        padding = 16 // itemsize
        head_row, value_row, scores_row = (dim + padding for dim in (spec.head_dim, spec.value_dim, spec.block_kv))
        return {
            "scores": (spec.block_q + spec.block_kv) * head_row * itemsize,
            "softmax": 0,
            "output": (spec.block_q * scores_row + spec.block_kv * value_row) * itemsize + 4 * spec.block_kv,
            "gradient_scores": (spec.block_q + spec.block_kv) * value_row * itemsize,
            "gradient_queries": (spec.block_q * scores_row + spec.block_kv * head_row) * itemsize + 4 * spec.block_kv,
            "gradient_keys": spec.block_q * (scores_row + head_row) * itemsize + 4 * spec.block_q,
        }[spec.entry]
