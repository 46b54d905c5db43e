"""Score functions of calls on a cache: one of `score=`, `softcap=` and `bias=`, at the positions of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..arrays import Array, ShapeDtype
from ..errors import collecting
from ..masks.shape import MaskShape
from ..planning.problem import Problem
from ..planning.score_launches import array_name
from ..planning.score_operands import captured_operands
from ..plans import as_arrays
from ..scores import Score
from ..scores.composition import composition
from ..scores.program import Program
from .arguments import place_reasons


class ScoreKind(NamedTuple):
    """A score function without the data of its arrays: equal ones have equal plans.

    Attributes
    ----------
    program : Program
    numbers : tuple of float
        What the program reads beside the arrays.
    shapes : tuple of ShapeDtype
        Of the program's arrays, in their order.
    """

    program: Program
    numbers: tuple[float, ...]
    shapes: tuple[ShapeDtype, ...]

    @classmethod
    def of_score(cls, score: Score) -> ScoreKind:
        """Leave out the data of a score's arrays."""
        shapes = (ShapeDtype(tuple(array.shape), array.dtype) for array in score.arrays.values())
        return cls(score.program, score.numbers, tuple(shapes))

    @property
    def arrays(self) -> Mapping[str, ShapeDtype]:
        """The shapes of the arrays by their names."""
        return {array.name: shape for array, shape in zip(self.program.arrays, self.shapes)}

    def of(self, problem: Problem) -> Problem:
        """A problem on a cache, whose keys are as many as the capacity, with the score function.

        Queries and keys stand at positions of the cache, so that arrays have elements for all of these.

        Raises
        ------
        UnsupportedProblem
            An index might leave its axis, or the bias does not fit; all reasons at once.
        """
        positions = MaskShape(problem.batch, problem.num_heads, problem.seqlen_kv, problem.seqlen_kv)
        operands = captured_operands(self, positions, True, problem.accumulator)
        return replace(
            problem, operands=problem.operands + operands, score=self.program, numbers=self.numbers
        )


def score_of(score: Any, softcap: Any, bias: Any, like: Array) -> Score | None:
    """One score function of what a call gives, over arrays of CuPy's or NumPy's; None where it gives none.

    A bias that is a list becomes an array where `like` lies.

    Raises
    ------
    TypeError
        The score is no function, or the bias no array.
    UnsupportedProblem
        One of them cannot be; all reasons at once.
    """
    made = composition(score, softcap, bias, lambda given: as_arrays({"bias": given}, like=like)["bias"])
    if made is None or not made.arrays:
        return made
    arrays = as_arrays(made.arrays)
    is_own = all(arrays[name] is array for name, array in made.arrays.items())
    return made if is_own else made._with_arrays(arrays)


def arrays_of(score: Score) -> dict[str, Array]:
    """The arrays of a score function by the names that kernels have for them."""
    return {array_name(name): array for name, array in score.arrays.items()}


def fit_reasons(score: Score, q: Array, k: Array, v: Array, capacity: int) -> list[str]:
    """Why a score function does not serve queries [batch, num_heads, n, head_dim] on a cache with pages k and v."""
    reasons = [
        reason
        for name, array in score.arrays.items()
        for reason in (
            [f"{name} must be an array here; got its shape alone"]
            if isinstance(array, ShapeDtype)
            else place_reasons(name, array, k)
        )
    ]
    longest = (ShapeDtype((q.shape[0], x.shape[1], capacity, x.shape[3]), q.dtype) for x in (k, v))
    with collecting(reasons):
        ScoreKind.of_score(score).of(Problem.of(ShapeDtype(q.shape, q.dtype), *longest))
    return reasons
