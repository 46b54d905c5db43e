"""The tangent of a score function on tiles of the cpu executor, and the tangents of its arrays' gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from ..planning.options import DOT
from ..planning.problem import Problem
from ..scores.program import Program, gradient_loads, pushed
from ..scores.values import Operands
from .tile_program import blocks
from .tile_scores import TileScores, clear, zeros_of


@dataclass(frozen=True, eq=False)
class ScoreTangents:
    """A problem's score function, pushed forward along the tangents of a call.

    Scores are tiles [tiles, keys, queries], in natural units.

    Attributes
    ----------
    score : TileScores
    program, slopes, derivatives : Program
        The programs of `score` with the tangents of their results.
    operands : Operands
        The captured arrays, followed by their tangents.
    loads : tuple of int
        The loads of `derivatives` whose arrays have gradients.
    moves_arrays : bool
        True if a captured array has a tangent.
    """

    score: TileScores
    program: Program
    slopes: Program
    derivatives: Program
    operands: Operands
    loads: tuple[int, ...]
    moves_arrays: bool

    @classmethod
    def of(cls, score: TileScores, problem: Problem, arrays: Mapping[str, Array | None]) -> ScoreTangents:
        captured = [operand for operand in problem.operands if operand.is_captured]
        moved = [operand for operand in captured if arrays.get(f"{operand.key}{DOT}") is not None]
        names = [operand.name for operand in moved]
        moves_score = any(arrays.get(name) is not None for name in ("q.dot", "k.dot"))
        tangents = [arrays[f"{operand.key}{DOT}"] for operand in moved]
        operands = score.operands._replace(arrays=[*score.operands.arrays, *tangents])
        program, slopes, derivatives = (
            pushed(each, names, moves_score=moves_score) for each in (score.program, score.slopes, score.derivatives)
        )
        loads = gradient_loads(derivatives, [score.program.arrays[number].name for number in score.sums])
        return cls(score, program, slopes, derivatives, operands, loads, bool(moved))

    def apply(self, s: Array, f_dot: Array, at: tuple[Array, ...]) -> None:
        """Replace scores by final scores, and tangents of scores in `f_dot` (if any) by those of final scores."""
        f, tangent = self.program.results
        for block in blocks(self.program, self.operands, s, at, frozenset((f, tangent)), f_dot):
            part = block.tiles, block.keys
            np.copyto(f_dot[part], block.values[tangent])
            np.copyto(s[part], block.values[f])

    def gradients(
        self,
        s: Array,
        s_dot: Array,
        gap: Array,
        gap_dot: Array,
        lse: Array,
        lse_dot: Array,
        at: tuple[Array, ...],
        mask: Callable[[Array], None] | None = None,
    ) -> None:
        """Replace scores by P, their tangents by P_dot, and `gap` and `gap_dot` by dS and dS_dot without the scale.

        Where P is 0, all four results are 0, whatever the derivatives are.

        Parameters
        ----------
        s_dot : array
            Tangents of the scores; memory with any contents if scores have no tangents.
        gap, gap_dot : array
            dP - delta and its tangent.
        lse, lse_dot : array [tiles, queries]
            The lse of the final scores and its tangent; lse is inf for rows without a key.
        mask : callable, optional
            Sets masked elements of an array to 0. If present, the tangents of gradients of captured arrays are
            accumulated, too.
        """
        program = self.slopes if mask is None else self.derivatives
        half = len(program.results) // 2
        (f, slope, *by_loads), (f_dot, slope_dot, *by_loads_dot) = program.results[:half], program.results[half:]
        loads = self.loads if by_loads else ()
        requested = frozenset(program.results).union(*(program.instructions[load].args for load in loads))
        is_seen: Array | None = None
        if mask is not None and loads:
            is_seen = np.ones(s.shape, bool)
            mask(is_seen.view(np.uint8))
        for block in blocks(program, self.operands, s, at, requested, s_dot):
            part, values = (block.tiles, block.keys), block.values
            p = np.subtract(values[f], lse[block.tiles, None, :], out=np.empty_like(s[part]))
            np.minimum(np.exp(p, out=p), 1, out=p)
            is_zero = zeros_of(p, None if is_seen is None else is_seen[part])
            p_dot = np.subtract(values[f_dot], lse_dot[block.tiles, None, :], out=np.empty_like(p))
            p_dot *= p
            df_dot = p_dot * gap[part]
            df_dot += p * gap_dot[part]
            df = p * gap[part]
            for load, by_load, by_load_dot in zip(loads, by_loads, by_loads_dot):
                terms = df_dot * values[by_load] + df * values[by_load_dot]
                clear(terms, is_zero)
                self.score._add(program, load, block, at[0], terms)
            ds_dot = df_dot * values[slope] + df * values[slope_dot]
            df *= values[slope]
            for x, result in ((s, p), (s_dot, p_dot), (gap, df), (gap_dot, ds_dot)):
                clear(result, is_zero)
                np.copyto(x[part], result)
