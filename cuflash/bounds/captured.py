"""Score functions with their arrays: errors of final scores, and bounds on the gradients of the arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..arrays import Array
from ..masks.places import Places
from ..planning.problem import Problem
from ..planning.staged_array import gradient_in_parts
from ..scores import Score
from ..scores.program import Program
from ..scores._primitives import Arithmetic
from ..scores.roundoff import (
    Coordinates, LoadErrors, PushedErrors, ScoreErrors, coordinates_of, pushed_errors, score_errors,
)  # fmt: skip
from ..scores.values import Operands
from .host import host_arrays
from .rounding import SECOND_ORDER, Rounding, limits, nan_to_inf, roundoff, summable, underflow


_Terms: TypeAlias = tuple[LoadErrors, Array, Array]  # derivatives by a load, their factors dF, and the errors of dF


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A problem's score function with its arrays, and the names of those that have gradients.

    The gradient of the array `in_parts` may be rounded for each batch entry or head before the sum over these.
    """

    program: Program
    operands: Operands
    wrt: tuple[str, ...]
    in_parts: str | None
    places: Places

    @classmethod
    def of(cls, score: Score, problem: Problem) -> Captured:
        arrays = host_arrays(dict(score.arrays))
        operands = Operands(problem.numbers, arrays, problem.whole_shape.batch)
        return cls(score.program, operands, problem.wrt, gradient_in_parts(problem), problem.places or Places())

    def final(self, s: Array, e_s: Array, allowed: Array, model: Rounding) -> ScoreErrors:
        """Return final scores and derivatives, with errors; all of them are 0 for masked keys."""
        arithmetic = Arithmetic(model.ua, model.wa, model.largest_sum)
        operands = self.operands._replace(arrays=[model.as_read(array)[0] for array in self.operands.arrays])
        errors = score_errors(self.program, operands, self.wrt, s, e_s, arithmetic, self._at(s))
        f, e_f, slope, e_slope = (np.where(allowed, x, 0) for x in errors[:4])
        return ScoreErrors(f, e_f, slope, e_slope, _attended(errors.loads, allowed))

    def pushed(
        self, s: Array, e_s: Array, s_dot: Array, e_s_dot: Array, tangents: Mapping[str, Array], allowed: Array,
        model: Rounding,
    ) -> PushedErrors:  # fmt: skip
        """Return the tangents of final scores and derivatives, with errors; all of them are 0 for masked keys."""
        names = [array.name for array in self.program.arrays if array.name in tangents]
        arrays = (*self.operands.arrays, *(np.asarray(tangents[name]) for name in names))
        operands = self.operands._replace(arrays=[model.as_read(array)[0] for array in arrays])
        arithmetic = Arithmetic(model.ua, model.wa, model.largest_sum)
        along = s, e_s, s_dot, e_s_dot, arithmetic, self._at(s)
        pushed = pushed_errors(self.program, operands, names, self.wrt, *along)
        loads, loads_dot = (_attended(each, allowed) for each in (pushed.loads, pushed.loads_dot))
        return PushedErrors._make((*(np.where(allowed, x, 0) for x in pushed[:6]), loads, loads_dot))

    def tolerances(self, final: ScoreErrors, df: Array, e_df: Array, model: Rounding) -> dict[str, Array]:
        """Return bounds on the gradients of captured arrays, by name, from the gradient `df` of final scores."""
        return self._bounds_on_sums([(load, df, e_df) for load in final.loads], model)

    def second_tolerances(
        self, pushed: PushedErrors, finals: tuple[Array, ...], model: Rounding
    ) -> dict[str, Array]:
        """Return the bounds on tangents of captured arrays' gradients; `finals` are dF, dF_dot, and their errors."""
        df, e_df, df_dot, e_df_dot = finals
        terms = [(load, df_dot, e_df_dot) for load in pushed.loads]
        return self._bounds_on_sums([*terms, *((load, df, e_df) for load in pushed.loads_dot)], model)

    def _at(self, s: Array) -> Coordinates:
        """Return the coordinates of scores in the larger call, if the call is a part of one."""
        return self.places.coordinates(*coordinates_of(s))

    def _bounds_on_sums(self, terms: list[_Terms], model: Rounding) -> dict[str, Array]:
        bounds = {}
        for number, array in enumerate(self.program.arrays):
            if array.name in self.wrt:
                own = [each for each in terms if each[0].array == number]
                rounding = (model.up, model.wp) if array.name == self.in_parts else (0.0, 0.0)
                bounds[array.name] = _gradient_tolerance(self.operands.arrays[number], own, model, rounding)
        return bounds


def _attended(loads: tuple[LoadErrors, ...], allowed: Array) -> tuple[LoadErrors, ...]:
    """Set the derivatives and errors of masked keys to 0."""
    return tuple(
        load._replace(value=np.where(allowed, load.value, 0), error=np.where(allowed, load.error, 0)) for load in loads
    )


def _gradient_tolerance(
    array: Array, own: list[_Terms], model: Rounding, rounding: tuple[float, float]
) -> Array:
    """Return the bound on a captured array's gradient; `rounding` is each term's roundoff and underflow."""
    exact, tolerance, masses, counts = np.zeros((4, array.size))
    for load, df, e_df in own:
        flat = np.ravel_multi_index(np.broadcast_arrays(*load.place), array.shape) if load.place else 0
        flat = np.broadcast_to(flat, df.shape).ravel()
        larger = np.abs(df) + e_df
        is_none = larger == 0  # such terms are 0, even if the derivative is infinite
        terms = e_df * np.abs(load.value) + larger * load.error
        mass = larger * (np.abs(load.value) + load.error)
        for total, x in ((exact, df * load.value), (tolerance, terms), (masses, mass)):
            np.add.at(total, flat, np.where(is_none, 0, x).ravel())
        np.add.at(counts, flat, 1)
    k = np.minimum(counts, 6 * np.sqrt(counts)) if model.probable else counts
    dtype = np.dtype(array.dtype)
    tolerance = tolerance + (k + 8) * model.ua * masses + roundoff(dtype) * np.abs(exact) + counts * model.wa
    tolerance = tolerance + rounding[0] * masses + counts * rounding[1]
    bound = nan_to_inf(SECOND_ORDER * summable(tolerance + underflow(dtype), model))
    bound = np.where(np.abs(exact) + bound > float(limits(dtype).max), np.inf, bound)
    return bound.reshape(array.shape)
