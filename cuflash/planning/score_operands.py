"""The arrays of a score function as operands of a problem: whether they fit its shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from ..errors import UnsupportedProblem
from ..masks.shape import MaskShape
from ..scores.program import Program
from ..scores.ranges import range_reasons
from ..scores.score import RESTARTED, Score
from .operands import Operand

_WIDEST = np.dtype(np.float64)


class Traced(Protocol):
    """A score function's program and numbers, with what has the shapes of its arrays."""

    @property
    def program(self) -> Program: ...

    @property
    def numbers(self) -> tuple[float, ...]: ...

    @property
    def arrays(self) -> Mapping[str, Any]: ...


def captured_operands(
    score: Score | Traced, shape: MaskShape, has_heads: bool, accumulator: np.dtype[Any]
) -> tuple[Operand, ...]:
    """The arrays that a score function captured, as operands.

    Raises
    ------
    UnsupportedProblem
        An index might leave its axis, the bias does not fit the problem, or the dtype of scores does not hold a number;
        all reasons at once.
    """
    reasons = _number_reasons(score.numbers, accumulator)
    if "bias" in score.arrays:
        scores_shape = (*shape.batch, *shape[1:]) if has_heads else shape[2:]
        reasons += _bias_reasons(tuple(score.arrays["bias"].shape), scores_shape)
    reasons += _start_reasons(score, shape)
    if not reasons:
        shapes = [tuple(map(int, array.shape)) for array in score.arrays.values()]
        extents = {"b": shape.num_batch, "h": shape.num_heads, "i": shape.seqlen_q, "j": shape.seqlen_kv}
        reasons = range_reasons(score.program, shapes, shape.batch, extents, accumulator.name)
    if reasons:
        raise UnsupportedProblem(reasons)
    return tuple(
        Operand(name, tuple(map(int, array.shape)), np.dtype(kind.dtype), is_captured=True)
        for (name, array), kind in zip(score.arrays.items(), score.program.arrays)
    )


def _number_reasons(numbers: Iterable[float], accumulator: np.dtype[Any]) -> list[str]:
    """Why numbers become 0 or infinite where scores are computed, which makes NaN of scores that are not.

    GPUs round numbers below the least normal one to 0.
    """
    limits = np.finfo(accumulator)
    least, most = float(limits.smallest_normal), float(limits.max)
    fix = "give one of such a size" if accumulator == _WIDEST else "give one of such a size, or float64 q, k and v"
    return [
        f"softcap and finite numbers of a score function, unless 0, must be of size {least:.2g} to {most:.2g} where "
        f"scores are {accumulator.name}; got {number!r}: {fix}"
        for number in numbers
        if number and math.isfinite(number) and not least <= abs(number) <= most
    ]


def _start_reasons(score: Score | Traced, shape: MaskShape) -> list[str]:
    """Why the offsets of a function of `scores.within` are not those of the rows of a call."""
    if not (isinstance(score, Score) and RESTARTED in score.facts):
        return []
    reasons = []
    for name, which in (("q_starts", "seqlen_q"), ("kv_starts", "seqlen_kv")):
        rows, length = score.arrays[name].shape[-1] if name in score.arrays else None, getattr(shape, which)
        if rows not in (None, length):
            offsets = "kv_offsets (q_offsets by default)" if name == "kv_starts" else "q_offsets"
            reasons.append(
                f"{offsets} of scores.within must end at {which}={length}; got offsets of {rows} rows: allow_gaps=True "
                f"and {which}={length} leave the rows behind the last sequence out"
            )
    return reasons


def _bias_reasons(shape: tuple[int, ...], scores_shape: tuple[int, ...]) -> list[str]:
    try:
        is_fit = np.broadcast_shapes(shape, scores_shape) == scores_shape
    except ValueError:
        is_fit = False
    if is_fit:
        return []
    names = "(*batch, num_heads, seqlen_q, seqlen_kv)" if len(scores_shape) > 2 else "(seqlen_q, seqlen_kv)"
    return [f"bias must broadcast to {names} = {scores_shape}; got {shape}"]
