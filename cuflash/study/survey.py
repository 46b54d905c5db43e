"""Measurements of the softmax mass that block patterns keep, for given queries, keys and values."""

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
    """The subject of a measurement: block size, pattern, and upper limit of the density."""

    block: int
    pattern: str
    at_most: float


class Measurement(NamedTuple):
    """The result for one case: the softmax mass that a pattern keeps, and the change of the output.

    Attributes
    ----------
    block, pattern, at_most
        The case.
    density : float
        Kept blocks divided by the blocks that dense attention visits; partial blocks count as whole ones.
    recall : float
        Softmax mass of the kept keys, averaged over all queries.
    lowest_head : float
        The recall of the head with the lowest recall.
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
    """A pattern in one size: its mask, and its density among the blocks that dense attention visits."""

    mask: Any
    density: float


class Survey:
    """Measurements of patterns against dense attention of the same q, k and v.

    Parameters
    ----------
    q, k, v : NumPy arrays
        Queries, keys and values as in `attention`, with the same number of queries and keys.
    causal : bool
        True if queries do not attend later keys.
    scale : float, optional
        Default: 1 / sqrt(head_dim).
    own : dict of OwnPattern by name, optional
        Patterns in addition to those of `FAMILIES`; see `own_patterns.loaded`.

    Raises
    ------
    TypeError
        For the same reasons as in `attention`.
    UnsupportedProblem
        For the same reasons as in `attention`, or because q and k are so large that scores overflow float64.
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
        self._least: dict[tuple[int, str], float] = {}  # lowest measured density of each of the user's own patterns
        self._dense = attention(*self._arrays, causal=causal, scale=scale, return_lse=True)
        if not np.isfinite(self._dense[1]).all():
            raise UnsupportedProblem("q and k must have finite scores; got scores that overflow: divide q or k")

    @cached_property
    def identity(self) -> str:
        """A digest of the arrays and options, which is equal for equal studies."""
        digest = hashlib.sha256(f"{self._causal} {self._scale}".encode())
        for array in self._arrays:
            digest.update(f"{array.shape} {array.dtype}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()[:12]

    def measurements(
        self, blocks: list[int], names: list[str], densities: list[float], known: Container[Case] = ()
    ) -> Iterator[Case | Measurement]:
        """Yield the measurement of each case, or only the case if it is known or every size exceeds its density limit.

        A size that is the densest within several limits is measured once. The user's own patterns are always measured
        again, because their code may have changed.

        Parameters
        ----------
        blocks : list of int
            Sides of square blocks in tokens.
        names : list of str
            Names of `FAMILIES` or of the user's own patterns, or "oracle".
        densities : list of float
            Upper limits of kept blocks divided by visited blocks, increasing.
        known : container of Case
            Cases that are not measured.
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
        """Return the density of a pattern's smallest size, or the lowest measured density of a user's own pattern.

        Parameters
        ----------
        block : int
            Side of square blocks in tokens.
        name : str
            A pattern for which `measurements` has yielded all cases.
        """
        if name in self._own:
            return self._least[block, name]
        eligible = self._eligible(block)
        if name == ORACLE:
            return float(len(eligible) / eligible.sum())  # the smallest oracle keeps one block per row
        return smallest_density(FAMILIES[name], eligible, self._num_heads)

    @property
    def _num_heads(self) -> int:
        q = self._arrays[0]
        return int(q.shape[-3]) if q.ndim > 2 else 1

    def _eligible(self, block: int) -> Array:
        """Return the blocks of the grid that dense attention visits."""
        grid = -(-self._arrays[0].shape[-2] // block)
        return np.tri(grid, dtype=bool) if self._causal else np.ones((grid, grid), bool)

    def _chosen(self, block: int, name: str, densities: list[float]) -> dict[float, _Form]:
        """Return the densest form within each limit; limits with equal forms share one object."""
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
                forms[limit] = form  # the mask does not depend on the density, and is measured once
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
        """Return the softmax mass of each block, [..., grid, grid]; compute one block row of scores at a time."""
        q, k, _ = self._arrays
        lse, scale = self._dense[1], 1 / math.sqrt(q.shape[-1]) if self._scale is None else self._scale
        mantissa, exponent = math.frexp(scale)
        # q and k are multiplied by these powers of two before the products, so that the products do not overflow.
        halves = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)
        seqlen, starts = q.shape[-2], np.arange(0, q.shape[-2], block)
        if q.ndim > 2:
            k = np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)
        q, k = (
            np.broadcast_to(x * x.dtype.type(half), (*lse.shape[:-1], *x.shape[-2:])) for x, half in zip((q, k), halves)
        )
        mass = np.zeros((*lse.shape[:-1], len(starts), len(starts)), lse.dtype)
        for head in np.ndindex(lse.shape[:-1]):
            for row, start in enumerate(starts):
                rows = slice(start, start + block)
                score = mantissa * (q[head][rows] @ k[head].T)
                p = np.exp(np.minimum(score - lse[head][rows, None], 0))  # only rounding makes the exponent exceed 0
                if self._causal:
                    p[np.arange(seqlen) > np.arange(seqlen)[rows, None]] = 0
                mass[*head, row] = np.add.reduceat(p.sum(0), starts)
        return mass

    def _measured(self, case: Case, form: _Form) -> Measurement:
        options = {"mask": form.mask, "causal": self._causal, "scale": self._scale}
        mass, error = compared(self._dense, attention(*self._arrays, **options, return_lse=True))
        of_heads = np.asarray(mass, np.float64).mean(-1)
        return Measurement(*case, form.density, float(of_heads.mean()), float(of_heads.min()), float(error))


def _wide_enough(q: Array, k: Array, v: Array, scale: float | None) -> tuple[Array, Array, Array]:
    """Return q, k and v, converted to float64 if their scores might overflow float32."""
    if not q.size or not k.size:
        return q, k, v
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
    largest = q.shape[-1] * factor * float(np.abs(q).max()) * float(np.abs(k).max())
    if largest < float(np.finfo(np.float32).max) / 16:
        return q, k, v
    wide_q, wide_k, wide_v = (x.astype(np.float64) for x in (q, k, v))
    return wide_q, wide_k, wide_v
