"""Calls of kernels in poisoned memory: NaN surrounds every input, and 0xFF fills and surrounds every output."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuflash.arrays import summed_to
from cuflash.executors.sim import Simulator
from cuflash.testing import Example, Structure
from executors import Run

import cuflash
from cuflash import masks
from cuflash.executors import gpu
from cuflash.executors.launch import run as run_pass
from cuflash.executors.workspaces import SeparateWorkspaces
from cuflash.planning.launches import Workspace

MARGIN = 2


class PoisonedGpu(gpu.Gpu):
    """A GPU with workspaces that have every bit set, which is NaN, whereas CuPy's hold arbitrary data."""

    def workspaces(self, needs: Mapping[str, Workspace]) -> SeparateWorkspaces:
        import cupy

        def poisoned(need: Workspace) -> Any:
            fill = 0 if need.is_zeroed else 0xFF
            return cupy.full(need.nbytes, fill, np.uint8).view(need.dtype).reshape(need.shape)

        return SeparateWorkspaces(needs, poisoned, self.address)


@dataclass
class Guarded:
    """An array in the middle of a larger one with every bit set: a NaN that no computation produces."""

    memory: Any
    shape: tuple[int, ...]
    dtype: Any
    margins: tuple[int, ...]  # elements on each side, by axis

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: Any, run: Run, margin: int) -> Guarded:
        """Make an array with margins.

        The margins are `margin` elements around each row, at most MARGIN rows and heads, and one batch entry.
        """
        near = min(margin, MARGIN)
        margins = ((min(margin, 1),) * len(shape))[3:] + (near, near, margin)[-len(shape) :]
        size = math.prod(extent + 2 * width for extent, width in zip(shape, margins))
        memory = run.put(np.full(size * np.dtype(dtype).itemsize, 0xFF, np.uint8))
        return cls(memory, shape, np.dtype(dtype), margins)

    @property
    def view(self) -> Any:
        """The array without its margins."""
        return self._inner(self.memory)

    def _inner(self, memory: Any) -> Any:
        whole = memory.view(self.dtype).reshape([x + 2 * width for x, width in zip(self.shape, self.margins)])
        return whole[tuple(slice(width, -width or None) for width in self.margins)]

    def result(self, name: str, run: Run) -> Any:
        """Return the written array; fail if anything around it was written, or any element was not."""
        memory = run.get(self.memory).copy()
        inner = self._inner(memory)
        result = inner.copy()
        assert not np.isnan(result).any(), f"{name} has elements that were not written, or are NaN"
        inner.view(f"u{inner.itemsize}")[...] = np.iinfo(f"u{inner.itemsize}").max
        assert memory.min(initial=0xFF) == 0xFF, f"memory around {name} was written"
        return result


def call(
    example: Example,
    run: Run,
    machine: Any = None,
    margin: int = MARGIN,
    check: Callable[..., object] = lambda **results: None,
    ready: cuflash.Plan | None = None,
) -> dict[str, Any]:
    """Run both passes on guarded memory and return all results.

    `machine` runs the kernels, by default the executor's own; `check` gets the results of each pass before the next.
    `ready` is a plan with the arrays that its kernels read in addition to q, k and v; by default it is created here.
    """
    machine = machine or (PoisonedGpu() if run.is_on_device else Simulator())
    q, k, v, do, dlse = (run.put(getattr(example, name)) for name in ("q", "k", "v", "do", "dlse"))
    plan = run.kernel_plan(example) if ready is None else ready._plan
    problem = plan.problem
    o = Guarded.of(problem.o_shape(), problem.dtype, run, margin)
    lse = Guarded.of(problem.lse_shape(), problem.accumulator, run, margin)
    operands = {"q": q, "k": k, "v": v, **({} if ready is None else ready._captured)}
    run_pass(plan, plan.kernels.forward, machine, operands | {"o": o.view, "lse": lse.view})
    forward = {"o": o.result("o", run), "lse": lse.result("lse", run)}
    check(**forward)
    shapes = problem.argument_shapes()
    heads = {"q": problem.num_heads, "k": problem.num_kv_heads, "v": problem.num_kv_heads}
    gradients = {}
    for name, shape in shapes.items():
        full = (*problem.batch, heads[name], *shape[-2:]) if problem.has_heads else shape
        kind = problem.dtype if full == shape else problem.accumulator
        gradients[name] = Guarded.of(full, kind, run, margin)
    inputs = operands | {"do": do, "o": o.view, "lse": lse.view} | ({} if dlse is None else {"dlse": dlse})
    results = {f"d{name}": each.view for name, each in gradients.items()}
    run_pass(plan, plan.kernels.backward, machine, inputs | results)
    backward = {}
    for name, each in gradients.items():
        backward[f"d{name}"] = summed_to(each.result(f"d{name}", run), shapes[name], problem.dtype)
    check(**backward)
    return forward | backward


def _dense(*shape: int, density: float = 0.3) -> Any:
    allowed = np.random.default_rng(sum(shape)).random(shape) < density
    allowed[..., :3, :] = allowed[..., -1:, :] = False  # the first and last rows have no key
    return allowed


def _blocks(block: Any, seqlen: int = 300, heads: tuple[int, ...] = ()) -> masks.Mask:
    block_q, block_kv = block if isinstance(block, tuple) else (block, block)
    grid = (*heads, -(-seqlen // block_q), -(-seqlen // block_kv))
    blocks = np.random.default_rng(block_q).random(grid) < 0.4
    blocks[..., 0, :] = False
    blocks[..., -1, -1] = True
    return masks.BlockPattern(blocks, (block_q, block_kv))


_SQUARE = {"num_heads": 2, "seqlen_q": 300, "seqlen_kv": 300, "head_dim": 32, "value_dim": 32}
_EACH_LAYOUT = ("padded", "transposed", "stepped", "negative", "padded")

# Masks for every kind of work list that a kernel walks.
MASKS = {
    "nothing masked": None,
    "a band": masks.SlidingWindow(70, 20),
    "causal": masks.Causal(),
    "causal, with lengths": masks.Causal() & masks.Lengths(q=200, kv=150),
    "intervals of heads": masks.Documents(np.arange(300) // 77) & masks.Causal(),
    "lengths of 0": masks.Lengths(q=290, kv=0),
    "bits": masks.Dense(_dense(2, 300, 300)),
    "a few bits": masks.Dense(_dense(300, 300, density=0.003)),
    "dilated": masks.Dilated(3),
    "full and interval blocks of 128": _blocks(128) & masks.Causal(),
    **{f"blocks of {block}": _blocks(block) for block in (16, 24, 64, 100, 128)},
    "blocks of 100 x 24, each head its own": _blocks((100, 24), heads=(2,)),
    "blocks of 16 x 128, causal": _blocks((16, 128)) & masks.Causal(),
    "blocks of 5": _blocks(5),
}


def structures() -> dict[str, Structure]:
    """Return structures of operands in poisoned memory, by name."""
    by_name = {
        f"mask: {name}": Structure(**_SQUARE, mask=mask, layouts=("padded",) * 5) for name, mask in MASKS.items()
    }
    plain = {"seqlen_q": 70, "seqlen_kv": 90}
    dims = ((1, 1), (40, 24), (64, 64), (96, 200), (200, 33), (256, 256), (17, 256))
    dtypes = ("float32", "bfloat16", "float64", "float16")
    for number, (head_dim, value_dim) in enumerate(dims):
        by_name[f"dims {head_dim} and {value_dim}"] = Structure(
            num_heads=2, **plain, head_dim=head_dim, value_dim=value_dim, dtype=dtypes[number % 4],
            mask=masks.Causal("bottom_right"), layouts=_EACH_LAYOUT,
        )  # fmt: skip
    for dtype in dtypes:
        head_dim = 40 if dtype == "bfloat16" else 32  # other structures of the dtype use the same kernels
        by_name[f"{dtype}, grouped heads"] = Structure(
            q_batch=(2,), k_batch=(2,), v_batch=(2,), num_heads=6, num_kv_heads=2, **plain, head_dim=head_dim,
            value_dim=24, dtype=dtype, layouts=_EACH_LAYOUT,
            mask=masks.Lengths(q=np.array([70, 1]), kv=np.array([13, 90])),
        )  # fmt: skip
        by_name[f"{dtype}, one head for all queries, axes that broadcast"] = Structure(
            q_batch=(3, 1), k_batch=(1, 2), v_batch=(2,), num_heads=8, num_kv_heads=1, seqlen_q=33, seqlen_kv=65,
            head_dim=16, value_dim=16, dtype=dtype, mask=masks.Dilated(2, align="top_left"),
        )  # fmt: skip
    for layout in ("transposed", "padded", "stepped", "negative", "offset", "broadcast", "odd_strides"):
        by_name[f"layout {layout}"] = Structure(
            num_heads=2, **plain, head_dim=32, value_dim=32, layouts=(layout,) * 5, mask=masks.Causal("top_left")
        )
    for seqlen_q, seqlen_kv in ((1, 1), (1, 130), (130, 1)):
        by_name[f"{seqlen_q} x {seqlen_kv}"] = Structure(num_heads=2, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    by_name |= {
        "five axes that do not fold": Structure(
            q_batch=(2, 1, 3, 1, 2), k_batch=(1, 2, 1, 2, 1), v_batch=(2, 2, 1, 1, 1), num_heads=2, num_kv_heads=1,
            seqlen_q=20, seqlen_kv=30, mask=masks.Lengths(kv=np.arange(48).reshape(2, 2, 3, 2, 2) % 31),
        ),
        "2-D": Structure(has_heads=False, seqlen_q=40, seqlen_kv=50, layouts=("stepped",) * 5, dtype="float64"),
        "without dlse": Structure(seqlen_q=40, seqlen_kv=50, has_dlse=False, mask=masks.Causal("bottom_right")),
        "logits of 1e5": Structure(num_heads=2, **plain, head_dim=32, value_dim=32, scale=1e4, values="outliers"),
    }  # fmt: skip
    return by_name


STRUCTURES = structures()
_MANY_AXES = {"k_batch": (1, 2, 1, 2, 1), "v_batch": (1,) * 5}
EMPTY = {
    "no query": Structure(num_heads=2, seqlen_q=0, seqlen_kv=5),
    "no key": Structure(num_heads=2, seqlen_q=5, seqlen_kv=0),
    "neither": Structure(has_heads=False, seqlen_q=0, seqlen_kv=0),
    "no batch entry": Structure(q_batch=(0,), k_batch=(0,), v_batch=(0,), seqlen_q=5, seqlen_kv=5),
    "no entry of the last of many axes": Structure(q_batch=(2, 1, 2, 1, 0), **_MANY_AXES, seqlen_q=5, seqlen_kv=5),
    "no entry of the first of many axes": Structure(q_batch=(0, 1, 2, 1, 2), **_MANY_AXES, seqlen_q=5, seqlen_kv=5),
}
