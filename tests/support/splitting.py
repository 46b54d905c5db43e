"""Forward passes in which thread blocks share each tile's keys: examples, and calls in poisoned memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from cuflash.planning.families.family import Request
from cuflash.planning.plan import KernelPlan
from cuflash.executors.sim import Simulator
from cuflash.testing import Example, Structure
from executors import SIM, Run
from poison import MARGIN, Guarded, PoisonedGpu

from cuflash import masks
from cuflash.executors.launch import run as run_pass


class Left(NamedTuple):
    """All arrays that a forward pass wrote, results and parts, on the host."""

    o: Any
    lse: Any
    o_parts: Any
    lse_parts: Any


def split_plan(example: Example, num_splits: int | None, run: Run = SIM) -> KernelPlan:
    plan = run.kernel_plan(example, kernel="sm80", deterministic=False)
    if plan.is_empty:
        return plan
    request = Request.over(plan.problem, plan.device, plan.work)
    kernels = plan.family.launches(request, plan.work, num_splits=num_splits)
    return replace(plan, kernels=kernels)


def forward(example: Example, num_splits: int, run: Run = SIM, machine: Any = None) -> Left:
    """Run a forward pass on guarded memory; parts hold NaN where no kernel writes."""
    machine = machine or (PoisonedGpu() if run.is_on_device else Simulator())
    plan = split_plan(example, num_splits, run)
    o = Guarded.of(plan.problem.o_shape(), plan.problem.dtype, run, MARGIN)
    lse = Guarded.of(plan.problem.lse_shape(), plan.problem.accumulator, run, MARGIN)
    q, k, v = (run.put(array) for array in (example.q, example.k, example.v))
    arrays = {"q": q, "k": k, "v": v, "o": o.view, "lse": lse.view}
    parts = dict(zip(plan.kernels.forward.workspaces, run_pass(plan, plan.kernels.forward, machine, arrays)))
    return Left(o.result("o", run), lse.result("lse", run), *(run.get(parts[name]) for name in parts))


def rounded(example: Example) -> Example:
    """Return an example with the bounds of kernels that round P to the dtype of V, or that split floats."""
    if example.q.dtype == np.float32:
        return example.but(precision="tf32x3")
    return example.but(product_dtype=example.q.dtype)


_RNG = np.random.default_rng(0)
_TWO = {"q_batch": (2,), "k_batch": (2,), "v_batch": (2,)}
_SQUARE = {**_TWO, "num_heads": 4, "num_kv_heads": 2, "seqlen_q": 70, "seqlen_kv": 300, "head_dim": 24, "value_dim": 20}
_FEW = {**_SQUARE, "seqlen_q": 5}  # the ten queries of a group are in one tile
# A step has 128 keys if there is no list. A window of 40 leaves most parts of a tile without a key.
STRUCTURES = {
    "dense": Structure(**_SQUARE, dtype="float16", layouts=("padded",) * 5),
    "causal": Structure(**_SQUARE, dtype="float16", mask=masks.Causal("bottom_right")),
    "window": Structure(**_SQUARE, dtype="float16", mask=masks.SlidingWindow(40, 0, "bottom_right")),
    "rows without a key": Structure(
        **_SQUARE, dtype="float16", mask=masks.Lengths(q=np.array([70, 1]), kv=np.array([0, 290]))
    ),
    "documents": Structure(
        **_SQUARE, dtype="float16", mask=masks.Documents(np.arange(70) // 20, np.arange(300) // 80)
    ),
    "full and interval blocks": Structure(
        **_SQUARE, dtype="float16",
        mask=masks.BlockPattern(_RNG.random((2, 4, 2, 5)) < 0.6, 64) & masks.Causal("bottom_right"),
    ),
    "bits": Structure(**_SQUARE, dtype="float16", mask=masks.Dilated(3, align="top_left"), layouts=("negative",) * 5),
    "blocks of 16 x 128": Structure(
        **_SQUARE, dtype="float16", mask=masks.BlockPattern(_RNG.random((5, 3)) < 0.5, (16, 128))
    ),
    "few queries, causal": Structure(**_FEW, dtype="bfloat16", mask=masks.Causal("bottom_right")),
    "few queries, lengths": Structure(**_FEW, dtype="bfloat16", mask=masks.Lengths(kv=np.array([0, 170]))),
    "few queries, windows of each head": Structure(
        **_FEW, dtype="bfloat16", mask=masks.FromFunction(lambda b, h, i, j: (j >= 10 * h) & (j < 100 + 40 * h)),
    ),
    "few queries, bits": Structure(**_FEW, dtype="bfloat16", mask=masks.Dilated(2, align="bottom_right")),
    "one query": Structure(
        **{**_SQUARE, "seqlen_q": 1, "num_heads": 8, "num_kv_heads": 1}, dtype="bfloat16", layouts=("transposed",) * 5
    ),
    "odd strides": Structure(**_FEW, dtype="bfloat16", layouts=("odd_strides",) * 5),
    "without heads": Structure(has_heads=False, seqlen_q=20, seqlen_kv=300, head_dim=8, value_dim=33, dtype="float16"),
    "axes that do not fold": Structure(
        q_batch=(2, 1, 3, 1), k_batch=(1, 2, 1, 2), v_batch=(2, 2, 1, 1), num_heads=2, num_kv_heads=1, seqlen_q=3,
        seqlen_kv=150, dtype="bfloat16", mask=masks.Causal("bottom_right"),
    ),
    "wide": Structure(**{**_FEW, "head_dim": 200, "value_dim": 256}, dtype="bfloat16"),
    "scale of a negative sign": Structure(**_FEW, dtype="bfloat16", scale=-3.0, values="outliers"),
    "float32": Structure(**_SQUARE, mask=masks.Causal("bottom_right"), layouts=("odd_strides",) * 5),
    "float32, bits": Structure(**_SQUARE, mask=masks.Dilated(3, align="top_left"), layouts=("padded",) * 5),
    "float32, few queries": Structure(**_FEW, mask=masks.Causal("bottom_right")),
    "float32, few queries, padded": Structure(
        **_FEW, mask=masks.Lengths(kv=np.array([0, 170])), layouts=("padded",) * 5
    ),
}  # fmt: skip
