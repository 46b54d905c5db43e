"""The arrays and numbers of a score function as operands of a problem, and the checks that they fit it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from ..errors import UnsupportedProblem, refuse
from ..masks.base import Mask
from ..masks.content import held_masks
from ..masks.sequences import Sequences
from ..masks.shape import MaskShape, broadcasts_to, missing_axes
from ..scores.program import Program
from ..scores.ranges import range_reasons
from ..scores.score import RESTARTED, UNALIGNED, Score
from .operands import Operand

_WIDEST = np.dtype(np.float64)
_MOST_EXACT = 1 << 24  # float32 represents all integers up to this one exactly


class Traced(Protocol):
    """A score function's program and numbers, and arrays or `ShapeDtype` with the shapes of its arrays."""

    @property
    def program(self) -> Program: ...

    @property
    def numbers(self) -> tuple[float, ...]: ...

    @property
    def arrays(self) -> Mapping[str, Any]: ...


def captured_operands(
    score: Score | Traced, shape: MaskShape, has_heads: bool, accumulator: np.dtype[np.generic]
) -> tuple[Operand, ...]:
    """Return the arrays that a score function captured, as operands.

    Raises
    ------
    UnsupportedProblem
        An index may be out of range, the bias does not fit the problem, or a number overflows or underflows the dtype
        of scores. The message lists all reasons.
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
    refuse(reasons)
    return tuple(
        Operand(name, tuple(map(int, array.shape)), np.dtype(kind.dtype), is_captured=True)
        for (name, array), kind in zip(score.arrays.items(), score.program.arrays)
    )


def _number_reasons(numbers: Iterable[float], accumulator: np.dtype[np.generic]) -> list[str]:
    """Return why numbers would become 0 or infinite in the dtype of scores, and so turn finite scores into NaN.

    GPUs flush subnormal numbers to 0.
    """
    limits = np.finfo(accumulator.name)
    least, most = float(limits.smallest_normal), float(limits.max)
    fix = "use such a number" if accumulator == _WIDEST else "use such a number, or float64 q, k and v"
    return [
        f"softcap and finite nonzero numbers of a score function must be from {least:.2g} to {most:.2g} in magnitude "
        f"for {accumulator.name} scores; got {number!r}: {fix}"
        for number in numbers
        if number and math.isfinite(number) and not least <= abs(number) <= most
    ]


def numbers_of(score: Score, shape: MaskShape, accumulator: np.dtype[np.generic]) -> tuple[float, ...]:
    """Return the numbers of a score function for a shape, including seqlen_kv - seqlen_q if the function reads it.

    Raises
    ------
    UnsupportedProblem
        The dtype of scores may not represent that difference exactly.
    """
    slot = score.program.shift_slot
    if slot is None:
        return score.numbers
    shift = shape.seqlen_kv - shape.seqlen_q
    if abs(shift) > _MOST_EXACT and accumulator != _WIDEST:
        raise UnsupportedProblem(
            [
                f"seqlen_kv - seqlen_q must be at most 2**24 in magnitude for a score with align='bottom_right' and "
                f"{accumulator.name} scores; got {shift}: use float64"
            ]
        )
    return (*score.numbers[:slot], float(shift), *score.numbers[slot + 1 :])


def alignment_reasons(score: Score, mask: Any, causal: Any, shape: MaskShape) -> list[str]:
    """Return why a score function of j - i needs an alignment: the mask aligns the last query with the last key.

    `mask` and `causal` are the unresolved arguments of the call, which may be invalid.
    """
    if UNALIGNED not in score.facts:
        return []
    is_unequal = shape.seqlen_q != shape.seqlen_kv
    parts = held_masks(mask) if isinstance(mask, Mask) else ()
    aligned = ["causal='bottom_right'"] if is_unequal and isinstance(causal, str) and causal == "bottom_right" else []
    aligned += [
        f"the mask's {type(part).__name__}"
        for part in parts
        if is_unequal and getattr(part, "align", None) == "bottom_right"
        or isinstance(part, Sequences) and part._has_shifted_diagonals
    ]
    return [
        f"score must have an alignment if {what} aligns the last query with the last key; got {score.name}, which "
        f"measures distances from the first query and key: pass align='bottom_right' to scores.alibi, "
        f"scores.relative_position or scores.within, or align='top_left' to keep these distances"
        for what in aligned[:1]
    ]


def _start_reasons(score: Score | Traced, shape: MaskShape) -> list[str]:
    """Return why the offsets of a score function of `scores.within` do not fit the lengths of a call."""
    if not (isinstance(score, Score) and RESTARTED in score.facts):
        return []
    reasons = []
    for name, which in (("q_starts", "seqlen_q"), ("kv_starts", "seqlen_kv")):
        rows, length = score.arrays[name].shape[-1] if name in score.arrays else None, getattr(shape, which)
        if rows not in (None, length):
            offsets = "kv_offsets (q_offsets by default)" if name == "kv_starts" else "q_offsets"
            reasons.append(
                f"{offsets} of scores.within must end at {which}={length}; got offsets of {rows} rows: pass "
                f"allow_gaps=True and {which}={length} to exclude the rows after the last sequence"
            )
    return reasons


def _bias_reasons(shape: tuple[int, ...], scores_shape: tuple[int, ...]) -> list[str]:
    if broadcasts_to(shape, scores_shape):
        return []
    names = "(*batch, num_heads, seqlen_q, seqlen_kv)" if len(scores_shape) > 2 else "(seqlen_q, seqlen_kv)"
    fix = missing_axes("bias", shape, scores_shape)
    return [f"bias must broadcast to {names} = {scores_shape}; got {shape}{fix}"]
