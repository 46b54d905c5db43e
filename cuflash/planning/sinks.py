"""Attention sinks in a plan: the parameters of kernels that take a sink, and the kernel that computes its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..arrays import DTYPES
from .launches import MATRICES, Feature, Launch, Pass, structure
from .problem import Problem
from .spec import SIMT, Entry, KernelSpec, smallest

SINK = structure((MATRICES, "sink", "dsink"), (np.int64, "dtype"))
_GRADIENT_WARPS = 8  # warps per thread block: enough loads in flight, since each head has only one block


def _sum_bytes(spec: KernelSpec) -> int:
    """Return the bytes of shared memory for one sum per thread."""
    return spec.num_threads * spec.accumulator.itemsize


_ENTRY = Entry(family=SIMT, name="sink_gradient", shared_bytes=_sum_bytes)


def sink_forward(forward: Pass, problem: Problem, *roles: str) -> Pass:
    """Return a forward pass whose kernels of these roles take the sink, if the problem has one."""
    if problem.operand("sink") is None:
        return forward

    def change(role: str, launch: Launch) -> Launch:
        return launch.taking("sink", reads=("sink",), has_sink=True) if role in roles else launch

    return forward.changed(change, _feature(problem))


def sink_backward(
    backward: Pass, problem: Problem, like: KernelSpec | None = None, reads: tuple[str, ...] = ("delta",),
    features: tuple[str, ...] = (),
) -> Pass:  # fmt: skip
    """Return a backward pass with the kernel that computes the sink's gradient, if the problem needs it.

    Parameters
    ----------
    like : KernelSpec, optional
        The specification of a kernel of the family, if the family has its own kernel for the gradient. By default, the
        simt family's kernel reads delta.
    reads : tuple of str
        Arrays from which the kernel gets delta. For rows without a key, it also reads o and dlse.
    features : tuple of str
        Features of the pass that the kernel takes as parameters.
    """
    if "sink" not in problem.wrt:
        return backward
    gradient = gradient_spec(problem.dtype, like)
    launch = Launch(
        spec=gradient, tiles=problem.num_heads, reads=("sink", "lse", "o", "dlse", *reads), writes=("dsink",),
        features=(*features, "sink"),
    )  # fmt: skip
    launches: Mapping[str, Launch] = {**backward.launches, "sink_gradient": launch}
    return replace(backward, launches=launches, features=(*backward.features, _feature(problem)))


def gradient_spec(dtype: np.dtype[np.generic], like: KernelSpec | None = None) -> KernelSpec:
    """Return the kernel that computes a sink's gradient for o of this dtype; by default that of the simt family."""
    like = like or smallest(_ENTRY, dtype)
    return replace(
        like, entry=replace(_ENTRY, family=like.family), num_warps=_GRADIENT_WARPS, min_blocks=1, num_stages=1,
        has_sink=True,
    )  # fmt: skip


def _feature(problem: Problem) -> Feature:
    operand = problem.operand("sink")
    assert operand is not None
    return Feature("sink", SINK, {"dtype": DTYPES.index(operand.dtype)})
