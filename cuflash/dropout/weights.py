"""Dropout of attention's weights, by numbers that a seed and the place of a weight determine: the host's half.

A number of 8 bits belongs to every weight. Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
SC 2011) makes sixteen of them at a time, of a cell of four queries and four keys, from the seed as key and a counter of
four words::

    counter = (4 (i // 16) + i % 8 // 2, 4 (j // 16) + j % 8 // 2, b num_heads + h, offset)
    number  = bits 8 (j % 2) + 4 (i % 2) + 2 (i // 8 % 2) + j // 8 % 2 of the words' eight halves, the lowest bit first

A weight is kept where its number is at least 256 p. A thread holds half of a cell's weights in a product of tensor
cores, whether its rows are queries or keys, and a neighbour the other half: they draw in turn and exchange the bits.
All numbers of two cells are compared with 256 p in eight instructions, a bit of each at a time.
kernels_cu/attention/dropout.cuh is the device's half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, ShapeDtype, describe, is_array, is_int, is_number, to_host
from ..errors import UnsupportedProblem, refuse
from ..keywords import explains_keywords
from ..layouts import is_tracer
from .generators import Rng, rng_reasons, seed_drawn_from
from .philox import philox4x32

__all__ = ["Dropout", "Draws", "kept", "seed_of"]

LEVELS = 1 << 8  # values of a number
SEED_DTYPES = (np.dtype(np.int64), np.dtype(np.uint64))
_MASK = (1 << 32) - 1


class Draws(NamedTuple):
    """The part of a dropout that a plan depends on; each call hands the seed and the offset to the kernels.

    >>> Draws(64).factor
    1.3333333333333333

    Attributes
    ----------
    threshold : int
        A weight is dropped where its number is below it.
    reads_seed : bool
        Whether kernels read the seed from an array.
    """

    threshold: int
    reads_seed: bool = False

    @property
    def factor(self) -> float:
        """The factor of weights that are kept, 1 / (1 - p)."""
        return LEVELS / (LEVELS - self.threshold)


@explains_keywords
@dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout of attention's weights: each is 0 with probability p, and else divided by 1 - p.

    Which weights are dropped depends on the seed, the offset and the weight's place alone: its batch entry, query head,
    query and key. So every call with equal ones drops the same weights, whatever kernel or executor computes it, and
    the gradients' pass draws them again instead of reading them.

    Parameters
    ----------
    p : float
        The probability, 0 <= p < 1. It is rounded to a multiple of 1/256, which the attribute is.
    seed : int, or 0-d array
        64 bits. An array of int64 or uint64, where q is, is read by each call when it runs: a CUDA graph that is
        replayed draws other weights once the array holds another seed. Required unless there is an `rng`.
    offset : int
        32 bits, such as a training step: another offset draws other weights.
    rng : numpy.random.Generator or int, optional
        Instead of `seed`: the seed is drawn from it, once.

    Raises
    ------
    UnsupportedProblem
        A number is out of its range, or none.

    Notes
    -----
    Srivastava et al., Dropout: a simple way to prevent neural networks from overfitting (JMLR 15, 2014). The numbers
    are those of Philox4x32-10 (Salmon et al., SC 2011).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((2, 100, 8), np.float32)
    >>> dropout = cuflash.Dropout(0.25, seed=3)
    >>> o = cuflash.attention(q, k, v, dropout=dropout)
    >>> kept = dropout.keep((2, 100, 100))
    >>> bool(np.allclose(o[..., 0], kept.sum(axis=-1) / 75))     # each weight is 1/100, and 1/75 where it is kept
    True
    """

    p: float
    seed: Any = None
    offset: int = 0
    _: KW_ONLY
    rng: InitVar[Rng | None] = None
    _draws: Draws = field(init=False, repr=False)  # what a plan depends on

    def __post_init__(self, rng: Rng | None) -> None:
        reasons: list[str] = []
        if not (is_number(self.p) and 0 <= self.p < 1):
            reasons.append(f"p must be a number, 0 <= p < 1; got {describe(self.p)}")
        elif self.p and round(self.p * LEVELS) in (0, LEVELS):
            reasons.append(f"p must be 0, or round to one of 1/256, 2/256, ..., 255/256; got {describe(self.p)}")
        if rng is None:
            reasons += _seed_reasons(self.seed)
        else:
            reasons += rng_reasons(rng) if self.seed is None else ["seed must not be passed beside rng: leave one out"]
        if not (is_int(self.offset) and 0 <= self.offset <= _MASK):
            reasons.append(f"offset must be an int from 0 to 2^32 - 1; got {describe(self.offset)}")
        refuse(reasons)
        if rng is not None:
            object.__setattr__(self, "seed", seed_drawn_from(rng))
        object.__setattr__(self, "p", round(float(self.p) * LEVELS) / LEVELS)
        object.__setattr__(self, "offset", int(self.offset))
        if is_int(self.seed):
            object.__setattr__(self, "seed", int(self.seed))
        object.__setattr__(self, "_draws", Draws(round(self.p * LEVELS), not isinstance(self.seed, int)))

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Dropout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        """Equal of equal dropouts; an array equals itself alone."""
        return self._draws, self._numbers, None if self._array is None else id(self._array)

    @property
    def _array(self) -> Array:
        """The array that holds the seed; None where the seed is a number."""
        return None if isinstance(self.seed, int) else self.seed

    @property
    def _numbers(self) -> tuple[int, int]:
        """The seed and the offset, which a call hands to kernels; 0 for a seed that an array holds."""
        return self.seed if isinstance(self.seed, int) else 0, self.offset

    def keep(
        self, shape: Sequence[int], queries: Array | None = None, keys: Array | None = None
    ) -> Array:
        """Tell which weights are kept, in NumPy.

        Parameters
        ----------
        shape : tuple of int
            (*batch, num_heads, seqlen_q, seqlen_kv), or (seqlen_q, seqlen_kv) for one head.
        queries, keys : int array of one axis, optional
            Rows and columns of the result, from 0 on; all of them unless given.

        Returns
        -------
        array of bool (*batch, num_heads, queries, keys), or (queries, keys)
            True where a weight is kept.

        Raises
        ------
        UnsupportedProblem
            `shape`, `queries` or `keys` is something else.

        Examples
        --------
        >>> Dropout(0.5, seed=0).keep((2, 5)).astype(int)
        array([[0, 1, 1, 1, 1],
               [0, 1, 0, 0, 0]])
        """
        is_shape = isinstance(shape, tuple) and len(shape) >= 2 and all(is_int(each) and each >= 0 for each in shape)
        if not is_shape:
            wanted = "(*batch, num_heads, seqlen_q, seqlen_kv) or (seqlen_q, seqlen_kv)"
            raise UnsupportedProblem([f"shape must be {wanted}; got {describe(shape)}"])
        *leading, seqlen_q, seqlen_kv = shape
        lengths = {"queries": (queries, seqlen_q), "keys": (keys, seqlen_kv)}
        reasons = [
            f"{name} must be an int array of one axis, of 0 to {length - 1} for this shape; "
            f"got {_described_places(given)}"
            for name, (given, length) in lengths.items()
            if given is not None and not _is_places(given, length)
        ]
        if isinstance(self.seed, ShapeDtype):
            reasons.append("seed must be a number or an array that holds one; got a ShapeDtype")
        refuse(reasons)
        i, j = (np.arange(length) if given is None else to_host(given) for given, length in lengths.values())
        seed = self.seed if isinstance(self.seed, int) else seed_of(self.seed)
        found = kept(self._draws, (seed, self.offset), np.arange(math.prod(leading)), i, j)
        return found.reshape(*leading, len(i), len(j))


def seed_of(array: Array) -> int:
    """The seed that an array holds, of any library with DLPack, as the 64 bits that kernels read."""
    host = array if is_array(array) else np.from_dlpack(array)
    return int(to_host(host)) % (1 << 64)


def kept(draws: Draws, numbers: tuple[int, int], heads: Array, i: Array, j: Array) -> Array:
    """Return which weights are kept, bool [heads, queries, keys].

    Parameters
    ----------
    numbers : pair of int
        The seed and the offset.
    heads, i, j : int arrays of one axis
        Numbers of heads over all batch entries, queries, and keys.
    """
    i, j = i.astype(np.uint64), j.astype(np.uint64)
    rows, row_of = np.unique(4 * (i // 16) + i % 8 // 2, return_inverse=True)
    columns, column_of = np.unique(4 * (j // 16) + j % 8 // 2, return_inverse=True)
    leading = heads.astype(np.uint64)[:, None, None] & np.uint64(_MASK)
    seed, offset = numbers
    words = philox4x32(seed, (rows[:, None], columns, leading, np.uint64(offset)))
    bits = (4 * (i % 2) + 2 * (i // 8 % 2))[:, None] + 8 * (j % 2) + j // 8 % 2
    halves = (word >> np.uint64(shift) & np.uint64(0xFFFF) for word in words for shift in (0, 16))
    is_kept: Array = np.uint64(0xFFFF)
    for level, half in enumerate(halves):  # numbers of a cell's weights that are no less than the threshold so far
        is_kept = half & is_kept if draws.threshold >> level & 1 else half | is_kept
    is_kept = np.broadcast_to(is_kept, (len(heads), len(rows), len(columns)))
    return (is_kept[:, row_of[:, None], column_of] >> bits & np.uint64(1)).astype(bool)


def _seed_reasons(seed: Any) -> list[str]:
    if is_int(seed):
        return [] if 0 <= seed < 1 << 64 else [f"seed must be an int from 0 to 2^64 - 1; got {describe(seed)}"]
    if is_tracer(seed):
        fix = "name the seed in static_argnames of jax.jit; each new one is traced again"
        return [f"seed must be an int when JAX traces the call; got a tracer: {fix}"]
    is_known = is_array(seed) or isinstance(seed, ShapeDtype)
    if not is_known and (isinstance(seed, np.generic) or not hasattr(seed, "__dlpack__")):
        fixes = {
            "Generator": ": pass it as rng=", "RandomState": ": seed=int(rng.randint(2**31))",
            "NoneType": ": pass seed= or rng=",
        }  # fmt: skip
        wanted = "seed must be an int, or an array of no axes of int64 or uint64"
        return [f"{wanted}; got {describe(seed)}{fixes.get(type(seed).__name__, '')}"]
    if is_known and (tuple(seed.shape) or seed.dtype not in SEED_DTYPES):
        return [f"seed must be an array of no axes of int64 or uint64; got {describe(seed)}: np.array(3) is one"]
    return []


def _is_ints(value: Any) -> bool:
    return is_array(value) and value.ndim == 1 and value.dtype.kind in "iu"


def _is_places(value: Any, length: int) -> bool:
    return _is_ints(value) and bool(((value >= 0) & (value < length)).all())


def _described_places(value: Any) -> str:
    return f"{value.min()}..{value.max()}" if _is_ints(value) else describe(value)
