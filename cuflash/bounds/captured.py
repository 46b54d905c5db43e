"""Score functions with their arrays: errors of final scores, and bounds on gradients of the arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..arrays import Array
from ..planning.problem import Problem
from ..planning.staged_array import gradient_in_parts
from ..scores import Score
from ..scores.program import Program
from ..scores._primitives import Arithmetic
from ..scores.roundoff import LoadErrors, PushedErrors, ScoreErrors, pushed_errors, score_errors
from ..scores.values import Operands
from .host import host_arrays
from .rounding import SECOND_ORDER, Rounding, limits, nan_to_inf, roundoff, underflow


_Terms: TypeAlias = tuple[LoadErrors, Array, Array]  # derivatives by a load, and what they multiply, with its error


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

    def pushed(
        self, s: Array, e_s: Array, s_dot: Array, e_s_dot: Array, tangents: Mapping[str, Array], allowed: Array,
        model: Rounding,
    ) -> PushedErrors:  # fmt: skip
        """The tangents of final scores and derivatives, with errors; all of it is 0 where a key is hidden."""
        names = [array.name for array in self.program.arrays if array.name in tangents]
        arrays = (*self.operands.arrays, *(np.asarray(tangents[name]) for name in names))
        operands = self.operands._replace(arrays=[model.as_read(array)[0] for array in arrays])
        arithmetic = Arithmetic(model.ua, model.wa, model.largest_sum)
        found = pushed_errors(self.program, operands, names, self.wrt, s, e_s, s_dot, e_s_dot, arithmetic)
        loads, loads_dot = (
            tuple(
                load._replace(value=np.where(allowed, load.value, 0), error=np.where(allowed, load.error, 0))
                for load in each
            )
            for each in (found.loads, found.loads_dot)
        )
        return PushedErrors._make((*(np.where(allowed, x, 0) for x in found[:6]), loads, loads_dot))

    def tolerances(self, final: ScoreErrors, df: Array, e_df: Array, model: Rounding) -> dict[str, Array]:
        """The bounds on gradients of captured arrays by name, from those of final scores."""
        return self._bounds_on_sums([(load, df, e_df) for load in final.loads], model)

    def second_tolerances(
        self, pushed: PushedErrors, finals: tuple[Array, ...], model: Rounding
    ) -> dict[str, Array]:
        """The bounds on the tangents of gradients of captured arrays; `finals` are dF, its error, dF_dot, its error."""
        df, e_df, df_dot, e_df_dot = finals
        terms = [(load, df_dot, e_df_dot) for load in pushed.loads]
        return self._bounds_on_sums([*terms, *((load, df, e_df) for load in pushed.loads_dot)], model)

    def _bounds_on_sums(self, terms: list[_Terms], model: Rounding) -> dict[str, Array]:
        found = {}
        for number, array in enumerate(self.program.arrays):
            if array.name in self.wrt:
                own = [each for each in terms if each[0].array == number]
                rounding = (model.up, model.wp) if array.name == self.in_parts else (0.0, 0.0)
                found[array.name] = _gradient_tolerance(self.operands.arrays[number], own, model, rounding)
        return found


def _gradient_tolerance(
    array: Array, own: list[_Terms], model: Rounding, rounding: tuple[float, float]
) -> Array:
    """The bound on a captured array's gradient; `rounding` is a roundoff and an underflow of each of its terms."""
    exact, tolerance, masses, counts = np.zeros((4, array.size))
    for load, df, e_df in own:
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
