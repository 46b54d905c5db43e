"""Tangents in a plan: the parameters of kernels that differentiate along tangents, and the passes of these kernels."""

from __future__ import annotations

from .dropout_launches import dropout_places, pass_with_dropout
from .launches import MATRICES, Feature, Pass, structure
from .options import DOT
from .problem import Problem
from .score_launches import with_pushed_score

NAME = "tangents"  # the feature's name
DELTA = "delta.own"  # the workspace of delta, in addition to "delta.dot", its tangent
_ARRAYS = {
    **{f"{name}_dot": f"{name}{DOT}" for name in ("q", "k", "v", "o", "lse", "sink", "do", "dlse")}, "delta": DELTA,
    "delta_dot": f"delta{DOT}",
}  # fmt: skip
TANGENTS = structure((MATRICES, *_ARRAYS))


def tangents_of_kernels(problem: Problem) -> tuple[str, ...]:
    """Return the tangents of a problem as `KernelSpec.tangents` names them."""
    captured = any(operand.is_captured and operand.name in problem.tangents for operand in problem.operands)
    return tuple(name for name in ("q", "k", "v", "sink", "do") if name in problem.tangents) + ("score",) * captured


def with_tangents(kernels: Pass, problem: Problem) -> Pass:
    """Return a pass whose kernels take the tangents, and apply the problem's score function and dropout."""
    kernels = with_pushed_score(kernels, problem)
    if problem.dropout is not None:
        places = dropout_places(problem.places, problem.num_heads, problem.whole_shape)
        kernels = pass_with_dropout(kernels, problem.dropout, places)
    feature = Feature(NAME, TANGENTS, names=_ARRAYS)
    return kernels.changed(lambda _, launch: launch.taking(NAME) if launch.spec.tangents else launch, feature)
