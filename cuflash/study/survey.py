"""Measure the share of attention that each pattern keeps, for given queries, keys and values."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..api import attention
from ..arrays import Array
from ..masks import BlockPattern
from .families import FAMILIES, ORACLE, densest, density_of, heaviest
from .recall import kept


class Case(NamedTuple):
    """Subject of a measurement: a pattern in blocks of a size, with at most a share of the blocks."""

    block: int
    pattern: str
    at_most: float


class Measurement(NamedTuple):
    """Share of attention that a pattern keeps.

    Attributes
    ----------
    block, pattern, at_most
        The case.
    density : float
        Kept blocks over the blocks that dense attention visits, partial ones counted whole.
    recall : float
        Mean share of the softmax mass on kept keys, over all queries.
    lowest_head : float
        The same of the head for which it is least.
    output_error : float
        Frobenius norm of the change of the output, divided by the norm of the output.
    """

    block: int
    pattern: str
    at_most: float
    density: float
    recall: float
    lowest_head: float
    output_error: float

    @property
    def case(self) -> Case:
        return Case(self.block, self.pattern, self.at_most)


class Survey:
    """Dense attention of q, k and v, against which patterns are measured.

    Parameters
    ----------
    q, k, v : NumPy arrays
        As `attention` takes them, as many queries as keys.
    causal : bool
        Whether queries attend no later keys.
    scale : float, optional
        1 / sqrt(head_dim) unless given.

    Raises
    ------
    TypeError, UnsupportedProblem
        As `attention` raises them.
    """

    def __init__(self, q: Array, k: Array, v: Array, *, causal: bool, scale: float | None) -> None:
        self._arrays, self._causal, self._scale = (q, k, v), causal, scale
        self._dense = attention(q, k, v, causal=causal, scale=scale, return_lse=True)

    @cached_property
    def identity(self) -> str:
        """A name of the arrays and options: equal for equal studies."""
        digest = hashlib.sha256(f"{self._causal} {self._scale}".encode())
        for array in self._arrays:
            digest.update(f"{array.shape} {array.dtype}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()[:12]

    def measurements(
        self, blocks: list[int], names: list[str], densities: list[float], known: Container[Case] = ()
    ) -> Iterator[Case | Measurement]:
        """Measure every case, or give the case alone where it is known or no size of the pattern fits it.

        Parameters
        ----------
        blocks : list of int
            Sides of square blocks in tokens.
        names : list of str
            Names of `FAMILIES`, or "oracle".
        densities : list of float
            Upper limits of kept blocks over visited blocks, increasing.
        known : container of Case
            Cases that need no measurement.
        """
        for block in blocks:
            for name in names:
                cases = [Case(block, name, limit) for limit in densities]
                is_known = all(case in known for case in cases)
                chosen = {} if is_known else self._chosen(block, name, densities)
                for case in cases:
                    fits = case.at_most in chosen and case not in known
                    yield self._measured(case, chosen[case.at_most]) if fits else case

    def _eligible(self, block: int) -> Array:
        """The blocks of the grid that dense attention visits."""
        grid = -(-self._arrays[0].shape[-2] // block)
        return np.tri(grid, dtype=bool) if self._causal else np.ones((grid, grid), bool)

    def _chosen(self, block: int, name: str, densities: list[float]) -> dict[float, Array]:
        eligible = self._eligible(block)
        if name == ORACLE:
            return heaviest(self._mass(block), densities, eligible)
        q = self._arrays[0]
        return densest(FAMILIES[name], densities, eligible, q.shape[-3] if q.ndim > 2 else 1)

    def _mass(self, block: int) -> Array:
        """The softmax mass of each block, [..., grid, grid], in memory for one block row of scores at a time."""
        q, k, _ = self._arrays
        lse, scale = self._dense[1], 1 / math.sqrt(q.shape[-1]) if self._scale is None else self._scale
        seqlen, starts = q.shape[-2], np.arange(0, q.shape[-2], block)
        if q.ndim > 2:
            k = np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)
        q, k = (np.broadcast_to(x, (*lse.shape[:-1], *x.shape[-2:])) for x in (q, k))
        mass = np.zeros((*lse.shape[:-1], len(starts), len(starts)), lse.dtype)
        for place in np.ndindex(lse.shape[:-1]):
            for row, start in enumerate(starts):
                rows = slice(start, start + block)
                p = np.exp(scale * (q[place][rows] @ k[place].T) - lse[place][rows, None])
                if self._causal:
                    p[np.arange(seqlen) > np.arange(seqlen)[rows, None]] = 0
                mass[*place, row] = np.add.reduceat(p.sum(0), starts)
        return mass

    def _measured(self, case: Case, blocks: Array) -> Measurement:
        mass, error = kept(
            self._dense, *self._arrays, BlockPattern(blocks, case.block), self._causal, self._scale
        )
        of_heads = np.asarray(mass, np.float64).mean(-1)
        density = density_of(blocks, self._eligible(case.block))
        return Measurement(*case, density, float(of_heads.mean()), float(of_heads.min()), error)
