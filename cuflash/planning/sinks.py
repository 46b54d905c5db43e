"""Attention sinks in a plan: the parameters of kernels that take a sink, and the kernel that makes its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..arrays import DTYPES
from .launches import MATRICES, Feature, Launch, Pass
from .problem import Problem
from .spec import SIMT, Entry, KernelSpec

SINK = np.dtype([("sink", MATRICES), ("dsink", MATRICES), ("dtype", np.int64)], align=True)
_GRADIENT_WARPS = 8  # enough loads in flight for one block a head


def _sum_bytes(spec: KernelSpec) -> int:
    """A sum for each thread."""
    return spec.num_threads * spec.accumulator.itemsize


_ENTRY = Entry(family=SIMT, name="sink_gradient", shared_bytes=_sum_bytes)


def sink_forward(made: Pass, problem: Problem, *roles: str) -> Pass:
    """A forward pass whose kernels of some roles take the sink, if the problem has one."""
    if problem.operand("sink") is None:
        return made
    with_sink = {
        role: replace(
            launch, spec=replace(launch.spec, has_sink=True), reads=(*launch.reads, "sink"),
            features=(*launch.features, "sink"),
        )
        for role, launch in made.launches.items() if role in roles
    }  # fmt: skip
    return replace(made, launches={**made.launches, **with_sink}, features=(*made.features, _feature(problem)))


def sink_backward(
    made: Pass, problem: Problem, like: KernelSpec | None = None, reads: tuple[str, ...] = ("delta",),
    features: tuple[str, ...] = (),
) -> Pass:  # fmt: skip
    """A backward pass with the kernel that makes the sink's gradient, if the problem asks for it.

    Parameters
    ----------
    like : KernelSpec, optional
        One of the family, if it has a kernel of its own; else delta is a vector, which the simt family's kernel reads.
    reads : tuple of str
        Arrays that delta comes from; o and dlse of rows without a key are read besides.
    features : tuple of str
        Features of the pass whose parameters that kernel takes.
    """
    if "sink" not in problem.wrt:
        return made
    gradient = gradient_spec(problem.dtype, like)
    launch = Launch(
        spec=gradient, tiles=problem.num_heads, reads=("sink", "lse", "o", "dlse", *reads), writes=("dsink",),
        features=(*features, "sink"),
    )  # fmt: skip
    launches: Mapping[str, Launch] = {**made.launches, "sink_gradient": launch}
    return replace(made, launches=launches, features=(*made.features, _feature(problem)))


def gradient_spec(dtype: np.dtype[np.generic], like: KernelSpec | None = None) -> KernelSpec:
    """The kernel that makes a sink's gradient beside o of a dtype; the simt family's reads no tiles."""
    if like is None:
        like = KernelSpec(entry=_ENTRY, dtype=dtype, head_dim=32, value_dim=32, block_q=16, block_kv=16)
    return replace(
        like, entry=replace(_ENTRY, family=like.family), num_warps=_GRADIENT_WARPS, min_blocks=1, num_stages=1,
        has_sink=True,
    )  # fmt: skip


def _feature(problem: Problem) -> Feature:
    operand = problem.operand("sink")
    assert operand is not None
    return Feature("sink", SINK, {"dtype": DTYPES.index(operand.dtype)})
