"""Measure the share of attention that each pattern keeps, for given queries, keys and values."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..api import attention
from ..arrays import Array
from ..blocks.index import BlockIndex
from ..errors import UnsupportedProblem
from ..masks import BlockPattern
from .families import FAMILIES, ORACLE, densest, density_of, heaviest, smallest_density
from .own_patterns import OwnPattern
from ._recall import compared


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


class _Form(NamedTuple):
    """A pattern of one size: its mask, and its share of the blocks that dense attention visits."""

    mask: Any
    density: float


class Survey:
    """Dense attention of q, k and v, against which patterns are measured.

    Parameters
    ----------
    q, k, v : NumPy arrays
        As `attention` takes them, as many queries as keys.
    causal : bool
        Whether queries attend no later keys.
    scale : float, optional
        Default: 1 / sqrt(head_dim).
    own : dict of OwnPattern by name, optional
        Patterns besides those of `FAMILIES`; see `own_patterns.loaded`.

    Raises
    ------
    TypeError
        As `attention` raises it.
    UnsupportedProblem
        As `attention` raises it, or q and k are so large that scores overflow float64.
    """

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        causal: bool,
        scale: float | None,
        own: Mapping[str, OwnPattern] | None = None,
    ) -> None:
        self._arrays, self._causal, self._scale = _wide_enough(q, k, v, scale), causal, scale
        self._own = dict(own or {})
        self._least: dict[tuple[int, str], float] = {}  # densities of the user's patterns, whose sizes are unknown
        self._dense = attention(*self._arrays, causal=causal, scale=scale, return_lse=True)
        if not np.isfinite(self._dense[1]).all():
            raise UnsupportedProblem(["q and k must have finite scores; got some that overflow: divide q or k"])

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

        A size that is the densest for several limits is measured once. Patterns of one's own are never known, since
        their code may have changed.

        Parameters
        ----------
        blocks : list of int
            Sides of square blocks in tokens.
        names : list of str
            Names of `FAMILIES` or of one's own patterns, or "oracle".
        densities : list of float
            Upper limits of kept blocks over visited blocks, increasing.
        known : container of Case
            Cases that need no measurement.
        """
        for block in blocks:
            for name in names:
                cases = [Case(block, name, limit) for limit in densities]
                wanted = [case for case in cases if name in self._own or case not in known]
                chosen = self._chosen(block, name, densities) if wanted else {}
                last: tuple[_Form, Measurement] | None = None
                for case in cases:
                    form = chosen.get(case.at_most)
                    if form is None or case not in wanted:
                        yield case
                        continue
                    if last is None or form is not last[0]:
                        last = form, self._measured(case, form)
                    yield last[1]._replace(at_most=case.at_most)

    def least_density(self, block: int, name: str) -> float:
        """Density of a pattern's smallest size, or the least at which a pattern of one's own was measured.

        Parameters
        ----------
        block : int
            Side of square blocks in tokens.
        name : str
            A name of which `measurements` has measured or passed all cases.
        """
        if name in self._own:
            return self._least[block, name]
        eligible = self._eligible(block)
        if name == ORACLE:
            return float(len(eligible) / eligible.sum())  # a block of every row
        return smallest_density(FAMILIES[name], eligible, self._num_heads)

    @property
    def _num_heads(self) -> int:
        q = self._arrays[0]
        return int(q.shape[-3]) if q.ndim > 2 else 1

    def _eligible(self, block: int) -> Array:
        """The blocks of the grid that dense attention visits."""
        grid = -(-self._arrays[0].shape[-2] // block)
        return np.tri(grid, dtype=bool) if self._causal else np.ones((grid, grid), bool)

    def _chosen(self, block: int, name: str, densities: list[float]) -> dict[float, _Form]:
        """The densest form by limit; limits that share a form hold the same object."""
        if name in self._own:
            return self._own_forms(block, name, densities)
        eligible = self._eligible(block)
        if name == ORACLE:
            kept_blocks = heaviest(self._mass(block), densities, eligible)
        else:
            kept_blocks = densest(FAMILIES[name], densities, eligible, self._num_heads)
        forms = {id(x): _Form(BlockPattern(x, block), density_of(x, eligible)) for x in kept_blocks.values()}
        return {limit: forms[id(x)] for limit, x in kept_blocks.items()}

    def _own_forms(self, block: int, name: str, densities: list[float]) -> dict[float, _Form]:
        q, k, _ = self._arrays
        seqlen, batch, eligible = q.shape[-2], q.shape[:-3], self._eligible(block)
        forms = {}
        form = _Form(None, np.inf)
        for limit in densities:
            mask = self._own[name](q, k, block=block, density=limit, causal=self._causal)
            if mask is form.mask and form.density <= limit:
                forms[limit] = form  # a mask that does not depend on the density is measured once
                continue
            try:
                index = BlockIndex.from_mask(mask, seqlen, seqlen, block, batch=batch, num_heads=self._num_heads)
            except UnsupportedProblem as error:
                raise UnsupportedProblem([f"{name}: {reason}" for reason in error.reasons]) from error
            form = _Form(mask, density_of(index.states() > 0, eligible))
            self._least[block, name] = min(form.density, self._least.get((block, name), np.inf))
            if form.density <= limit:
                forms[limit] = form
        return forms

    def _mass(self, block: int) -> Array:
        """The softmax mass of each block, [..., grid, grid], in memory for one block row of scores at a time."""
        q, k, _ = self._arrays
        lse, scale = self._dense[1], 1 / math.sqrt(q.shape[-1]) if self._scale is None else self._scale
        mantissa, exponent = math.frexp(scale)
        halves = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)  # exact, and first: products stay in range
        seqlen, starts = q.shape[-2], np.arange(0, q.shape[-2], block)
        if q.ndim > 2:
            k = np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)
        q, k = (
            np.broadcast_to(x * x.dtype.type(half), (*lse.shape[:-1], *x.shape[-2:])) for x, half in zip((q, k), halves)
        )
        mass = np.zeros((*lse.shape[:-1], len(starts), len(starts)), lse.dtype)
        for place in np.ndindex(lse.shape[:-1]):
            for row, start in enumerate(starts):
                rows = slice(start, start + block)
                score = mantissa * (q[place][rows] @ k[place].T)
                p = np.exp(np.minimum(score - lse[place][rows, None], 0))  # above 0 by rounding alone
                if self._causal:
                    p[np.arange(seqlen) > np.arange(seqlen)[rows, None]] = 0
                mass[*place, row] = np.add.reduceat(p.sum(0), starts)
        return mass

    def _measured(self, case: Case, form: _Form) -> Measurement:
        options = {"mask": form.mask, "causal": self._causal, "scale": self._scale}
        mass, error = compared(self._dense, attention(*self._arrays, **options, return_lse=True))
        of_heads = np.asarray(mass, np.float64).mean(-1)
        return Measurement(*case, form.density, float(of_heads.mean()), float(of_heads.min()), float(error))


def _wide_enough(q: Array, k: Array, v: Array, scale: float | None) -> tuple[Array, Array, Array]:
    """q, k and v, in float64 if their scores might overflow float32."""
    if not q.size or not k.size:
        return q, k, v
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
    largest = q.shape[-1] * factor * float(np.abs(q).max()) * float(np.abs(k).max())
    if largest < float(np.finfo(np.float32).max) / 16:
        return q, k, v
    wide_q, wide_k, wide_v = (x.astype(np.float64) for x in (q, k, v))
    return wide_q, wide_k, wide_v
