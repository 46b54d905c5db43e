"""Score functions with their arrays: errors of final scores, and bounds on gradients of the arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from ..planning.problem import Problem
from ..planning.staged_array import gradient_in_parts
from ..scores import Score
from ..scores.program import Program
from ..scores._primitives import Arithmetic
from ..scores.roundoff import LoadErrors, ScoreErrors, score_errors
from ..scores.values import Operands
from .host import host_arrays
from .rounding import SECOND_ORDER, Rounding, limits, nan_to_inf, roundoff, underflow


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A problem's score function with its arrays, and which of these have gradients.

    That of the array `in_parts` may be rounded for each batch entry or head before these are added up.
    """

    program: Program
    operands: Operands
    wrt: tuple[str, ...]
    in_parts: str | None

    @classmethod
    def of(cls, score: Score, problem: Problem) -> Captured:
        arrays = host_arrays(dict(score.arrays))
        operands = Operands(problem.numbers, arrays, problem.batch)
        return cls(score.program, operands, problem.wrt, gradient_in_parts(problem))

    def final(self, s: Array, e_s: Array, allowed: Array, model: Rounding) -> ScoreErrors:
        """Final scores and derivatives, with errors; all of it is 0 where the mask is False."""
        arithmetic = Arithmetic(model.ua, model.wa, model.largest_sum)
        operands = self.operands._replace(arrays=[model.as_read(array)[0] for array in self.operands.arrays])
        found = score_errors(self.program, operands, self.wrt, s, e_s, arithmetic)
        loads = (
            load._replace(value=np.where(allowed, load.value, 0), error=np.where(allowed, load.error, 0))
            for load in found.loads
        )
        f, e_f, slope, e_slope = (np.where(allowed, x, 0) for x in found[:4])
        return ScoreErrors(f, e_f, slope, e_slope, tuple(loads))

    def tolerances(self, final: ScoreErrors, df: Array, e_df: Array, model: Rounding) -> dict[str, Array]:
        """The bounds on gradients of captured arrays by name, from those of final scores."""
        found = {}
        for number, array in enumerate(self.program.arrays):
            if array.name in self.wrt:
                loads = [load for load in final.loads if load.array == number]
                rounding = (model.up, model.wp) if array.name == self.in_parts else (0.0, 0.0)
                found[array.name] = _gradient_tolerance(self.operands.arrays[number], loads, df, e_df, model, rounding)
        return found


def _gradient_tolerance(
    array: Array, loads: list[LoadErrors], df: Array, e_df: Array, model: Rounding, rounding: tuple[float, float]
) -> Array:
    """The bound on a captured array's gradient; `rounding` is a roundoff and an underflow of each of its terms."""
    exact, tolerance, masses, counts = np.zeros((4, array.size))
    for load in loads:
        flat = np.ravel_multi_index(np.broadcast_arrays(*load.place), array.shape) if load.place else 0
        flat = np.broadcast_to(flat, df.shape).ravel()
        larger = np.abs(df) + e_df
        is_none = larger == 0  # whatever the derivative is there
        terms = e_df * np.abs(load.value) + larger * load.error
        mass = larger * (np.abs(load.value) + load.error)
        for total, x in ((exact, df * load.value), (tolerance, terms), (masses, mass)):
            np.add.at(total, flat, np.where(is_none, 0, x).ravel())
        np.add.at(counts, flat, 1)
    k = np.minimum(counts, 6 * np.sqrt(counts)) if model.probable else counts
    dtype = np.dtype(array.dtype)
    tolerance = tolerance + (k + 8) * model.ua * masses + roundoff(dtype) * np.abs(exact) + counts * model.wa
    tolerance = tolerance + rounding[0] * masses + counts * rounding[1]
    bound = nan_to_inf(SECOND_ORDER * (tolerance + underflow(dtype)))
    bound = np.where(np.abs(exact) + bound > float(limits(dtype).max), np.inf, bound)
    return bound.reshape(array.shape)
