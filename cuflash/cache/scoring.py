"""Score functions of calls on a cache: `score=`, `softcap=` and `bias=` combined, at the positions of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ..arrays import Array, ShapeDtype
from ..errors import collecting
from ..masks.shape import MaskShape
from ..planning.options import ScoreLike
from ..planning.problem import Problem
from ..planning.score_launches import array_name
from ..planning.score_operands import captured_operands
from ..plans.conversion import as_arrays
from ..scores import Score
from ..scores.composition import composition
from ..scores.program import Program
from .arguments import place_reasons


class ScoreKind(NamedTuple):
    """A score function without the data of its arrays: equal kinds have equal plans.

    Attributes
    ----------
    program : Program
    numbers : tuple of float
        Constants that the program reads, in addition to the arrays.
    shapes : tuple of ShapeDtype
        The shapes of the program's arrays, in their order.
    """

    program: Program
    numbers: tuple[float, ...]
    shapes: tuple[ShapeDtype, ...]

    @classmethod
    def of_score(cls, score: Score) -> ScoreKind:
        """Return the kind of a score: its arrays are replaced by their shapes and dtypes."""
        shapes = (ShapeDtype(tuple(array.shape), array.dtype) for array in score.arrays.values())
        return cls(score.program, score.numbers, tuple(shapes))

    @property
    def arrays(self) -> Mapping[str, ShapeDtype]:
        """The shapes of the arrays by name."""
        return {array.name: shape for array, shape in zip(self.program.arrays, self.shapes)}

    def of(self, problem: Problem) -> Problem:
        """Add the score function to a problem on a cache, whose number of keys is the capacity.

        Queries and keys have positions in the cache, so the arrays must have elements for all positions.

        Raises
        ------
        UnsupportedProblem
            An index might be out of bounds, or the bias does not fit; the error lists all reasons.
        """
        positions = MaskShape(problem.batch, problem.num_heads, problem.seqlen_kv, problem.seqlen_kv)
        operands = captured_operands(self, positions, True, problem.accumulator)
        return replace(
            problem, operands=problem.operands + operands, score=self.program, numbers=self.numbers
        )


def score_of(score: ScoreLike | None, softcap: float | None, bias: Array | None, like: Array) -> Score | None:
    """Return one score function for the score, softcap and bias of a call, over CuPy or NumPy arrays, or None.

    A bias in a list becomes an array on the device of `like`.

    Raises
    ------
    TypeError
        The score is not a function, or the bias is not an array.
    UnsupportedProblem
        An argument is not supported; the error lists all reasons.
    """
    composed = composition(score, softcap, bias, lambda values: as_arrays({"bias": values}, like=like)["bias"])
    if composed is None or not composed.arrays:
        return composed
    arrays = as_arrays(composed.arrays)
    is_own = all(arrays[name] is array for name, array in composed.arrays.items())
    return composed if is_own else composed._with_arrays(arrays)


def arrays_of(score: Score) -> dict[str, Array]:
    """Return the arrays of a score function by their names in kernels."""
    return {array_name(name): array for name, array in score.arrays.items()}


def fit_reasons(score: Score, q: Array, k: Array, v: Array, capacity: int) -> list[str]:
    """Return why a score function does not fit queries [batch, num_heads, n, head_dim] and a cache's pages k, v."""
    reasons = [
        reason
        for name, array in score.arrays.items()
        for reason in (
            [f"{name} must be an array; got only a shape and dtype"]
            if isinstance(array, ShapeDtype)
            else place_reasons(name, array, k)
        )
    ]
    longest = (ShapeDtype((q.shape[0], x.shape[1], capacity, x.shape[3]), q.dtype) for x in (k, v))
    with collecting(reasons):
        ScoreKind.of_score(score).of(Problem.of(ShapeDtype(q.shape, q.dtype), *longest))
    return reasons
