"""Dropout of attention weights on the host. kernels_cu/attention/dropout.cuh computes the same on the device.

Each weight has an 8-bit random number, which depends only on the seed and on the weight's position. One call of
Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011) yields the random bits of sixteen
weights, a cell of four queries and four keys. The seed is the key, and the counter has four words::

    counter = (4 (i // 16) + i % 8 // 2, 4 (j // 16) + j % 8 // 2, b num_heads + h, offset)
    number  = bits 8 (j % 2) + 4 (i % 2) + 2 (i // 8 % 2) + j // 8 % 2 of the words' eight halves, the lowest bit first

A weight is kept if its number is at least 256 p. In a tensor-core product, whether its rows are queries or keys, a
thread owns half of a cell's weights and a neighbouring thread owns the other half. The two alternate Philox calls and
exchange the bits. The kernels compare all numbers of two cells with 256 p at once, in eight instructions, one per bit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, ShapeDtype, describe, is_array, is_int, is_number, to_host
from ..errors import UnsupportedProblem, refuse
from ..keywords import explains_keywords
from ..layouts import is_jax_array, is_tracer
from .generators import Rng, rng_reasons, seed_drawn_from
from .philox import philox4x32


LEVELS = 1 << 8  # number of values of a weight's random number
SEED_DTYPES = (np.dtype(np.int64), np.dtype(np.uint64))
_MASK = (1 << 32) - 1
_KEY_OF_TWO_WORDS = "key<fry>"  # dtype of the keys of threefry, JAX's default generator


class Draws(NamedTuple):
    """The part of a dropout that a plan depends on; seed and offset are kernel arguments of each call instead.

    >>> Draws(64).factor
    1.3333333333333333

    Attributes
    ----------
    threshold : int
        A weight is dropped if its random number is below the threshold.
    reads_seed : bool
        True if kernels read the seed from an array.
    """

    threshold: int
    reads_seed: bool = False

    @property
    def factor(self) -> float:
        """The factor of the weights that are kept, 1 / (1 - p)."""
        return LEVELS / (LEVELS - self.threshold)


@explains_keywords
@dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout of attention weights: each weight is 0 with probability p, and is divided by 1 - p otherwise.

    Which weights are dropped depends only on the seed, the offset and the position of a weight: its batch entry, query
    head, query and key. Calls with equal seeds and offsets therefore drop the same weights with any kernel and
    executor, and the backward pass draws the same random bits again instead of storing them.

    Parameters
    ----------
    p : float
        The probability of dropping a weight, 0 <= p < 1. The attribute holds p rounded to a multiple of 1/256.
    seed : int, or 0-d array
        64 bits. A 0-d array of int64 or uint64 must be on the same device as q. Each call reads it when the kernels
        run: a replayed CUDA graph drops different weights after the array has been set to a different seed.
        `cuflash.jax.attention` also takes a key of `jax.random.key`, or an array of two uint32, the low one first.
        Required if `rng` is None.
    offset : int
        32 bits, for example the training step. Different offsets drop different weights.
    rng : numpy.random.Generator or int, optional
        The generator from which the seed is drawn once, instead of `seed`.

    Raises
    ------
    UnsupportedProblem
        An argument is out of range, or is not a number.

    Notes
    -----
    Srivastava et al., Dropout: a simple way to prevent neural networks from overfitting (JMLR 15, 2014). The random
    bits come from Philox4x32-10 (Salmon et al., SC 2011).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((2, 100, 8), np.float32)
    >>> dropout = cuflash.Dropout(0.25, seed=3)
    >>> o = cuflash.attention(q, k, v, dropout=dropout)
    >>> keep = dropout.keep((2, 100, 100))
    >>> bool(np.allclose(o[..., 0], keep.sum(axis=-1) / 75))     # each weight is 1/100, and 1/75 if it is kept
    True
    """

    p: float
    seed: Any = None
    offset: int = 0
    _: KW_ONLY
    rng: InitVar[Rng | None] = None
    _draws: Draws = field(init=False, repr=False)  # the part of the dropout that a plan depends on

    def __post_init__(self, rng: Rng | None) -> None:
        reasons: list[str] = []
        if not (is_number(self.p) and 0 <= self.p < 1):
            reasons.append(f"p must be a number, 0 <= p < 1; got {describe(self.p)}")
        elif self.p and round(self.p * LEVELS) in (0, LEVELS):
            reasons.append(f"p must be 0, or round to one of 1/256, 2/256, ..., 255/256; got {describe(self.p)}")
        if rng is None:
            reasons += _seed_reasons(self.seed)
        else:
            reasons += rng_reasons(rng) if self.seed is None else ["seed must not be passed with rng: leave one out"]
        if not (is_int(self.offset) and 0 <= self.offset <= _MASK):
            fix = ": fold the training step into seed by jax.random.fold_in instead" if is_tracer(self.offset) else ""
            reasons.append(f"offset must be an int from 0 to 2^32 - 1; got {describe(self.offset)}{fix}")
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
        """The value by which dropouts are compared; seeds in arrays are equal only if they are the same array."""
        return self._draws, self._numbers, None if self._array is None else id(self._array)

    @property
    def _array(self) -> Array:
        """The array that holds the seed, or None if the seed is a number."""
        return None if isinstance(self.seed, int) else self.seed

    @property
    def _numbers(self) -> tuple[int, int]:
        """The seed and the offset, which are kernel arguments of a call; the seed is 0 if an array holds it."""
        return self.seed if isinstance(self.seed, int) else 0, self.offset

    def keep(
        self, shape: Sequence[int], queries: Array | None = None, keys: Array | None = None
    ) -> Array:
        """Return a NumPy array of booleans, True for the weights that are kept.

        Parameters
        ----------
        shape : tuple of int
            (*batch, num_heads, seqlen_q, seqlen_kv), or (seqlen_q, seqlen_kv) for one head.
        queries, keys : 1-d int array, optional
            Positions of the queries and keys of the result, counted from 0. Default: all of them.

        Returns
        -------
        array of bool (*batch, num_heads, queries, keys), or (queries, keys)
            True for each weight that is kept.

        Raises
        ------
        UnsupportedProblem
            `shape` is not a tuple of lengths, or `queries` or `keys` is not a 1-d array of ints within these lengths.

        Examples
        --------
        >>> Dropout(0.5, seed=0).keep((2, 5)).astype(int)
        array([[0, 1, 1, 1, 1],
               [0, 1, 0, 0, 0]])
        """
        is_shape = isinstance(shape, tuple) and len(shape) >= 2 and all(is_int(size) and size >= 0 for size in shape)
        if not is_shape:
            wanted = "(*batch, num_heads, seqlen_q, seqlen_kv) or (seqlen_q, seqlen_kv)"
            raise UnsupportedProblem(f"shape must be {wanted}; got {describe(shape)}")
        *leading, seqlen_q, seqlen_kv = shape
        lengths = {"queries": (queries, seqlen_q), "keys": (keys, seqlen_kv)}
        reasons = [
            f"{name} must be a 1-d int array with values from 0 to {length - 1} for this shape; "
            f"got {_describe_positions(positions)}"
            for name, (positions, length) in lengths.items()
            if positions is not None and not _are_positions(positions, length)
        ]
        if isinstance(self.seed, ShapeDtype):
            reasons.append("seed must be a number or an array that holds one; got a ShapeDtype")
        refuse(reasons)
        i, j = (
            np.arange(length) if positions is None else to_host(positions) for positions, length in lengths.values()
        )
        seed = self.seed if isinstance(self.seed, int) else seed_of(self.seed)
        is_kept = keep_mask(self._draws, (seed, self.offset), np.arange(math.prod(leading)), i, j)
        return is_kept.reshape(*leading, len(i), len(j))


def seed_of(array: Array) -> int:
    """Return the seed that an array of any DLPack library holds, as the 64 bits that kernels read."""
    if is_jax_array(array):
        host = np.asarray(sys.modules["jax"].random.key_data(array) if is_key(array) else array)
        return int(host.reshape(-1).view(np.uint64)[0])
    host = array if is_array(array) else np.from_dlpack(array)
    return int(to_host(host)) % (1 << 64)


def is_key(array: Array) -> bool:
    """True if an array is a key of `jax.random.key`."""
    return is_jax_array(array) and str(array.dtype).startswith("key<")


def keep_mask(draws: Draws, numbers: tuple[int, int], heads: Array, i: Array, j: Array) -> Array:
    """Return a bool array [heads, queries, keys], True for the weights that are kept.

    Parameters
    ----------
    numbers : pair of int
        The seed and the offset.
    heads, i, j : 1-d int arrays
        Numbers of the heads, counted through all batch entries, and positions of the queries and of the keys.
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
    for level, half in enumerate(halves):  # compare all numbers of a cell with the threshold, lowest bit first
        is_kept = half & is_kept if draws.threshold >> level & 1 else half | is_kept
    is_kept = np.broadcast_to(is_kept, (len(heads), len(rows), len(columns)))
    return (is_kept[:, row_of[:, None], column_of] >> bits & np.uint64(1)).astype(bool)


def _seed_reasons(seed: Array) -> list[str]:
    if is_int(seed):
        return [] if 0 <= seed < 1 << 64 else [f"seed must be an int from 0 to 2^64 - 1; got {describe(seed)}"]
    if is_jax_array(seed):
        is_plain_key = is_key(seed) and not seed.shape and str(seed.dtype) == _KEY_OF_TWO_WORDS
        are_words = not is_key(seed) and tuple(seed.shape) == (2,) and seed.dtype == np.uint32
        if is_plain_key or are_words or not is_key(seed) and not seed.shape and seed.dtype in SEED_DTYPES:
            return []
        rule = "seed must be a key of jax.random.key, two numbers of uint32, or a 0-d array of int64 or uint64"
        return [f"{rule}; got shape {tuple(seed.shape)} and {seed.dtype}: pass jax.random.bits(key, 2, 'uint32')"]
    is_known = is_array(seed) or isinstance(seed, ShapeDtype)
    if not is_known and (isinstance(seed, np.generic) or not hasattr(seed, "__dlpack__")):
        fixes = {
            "Generator": ": pass it as rng=", "RandomState": ": seed=int(rng.randint(2**31))",
            "NoneType": ": pass seed= or rng=",
        }  # fmt: skip
        wanted = "seed must be an int, or a 0-d array of int64 or uint64"
        return [f"{wanted}; got {describe(seed)}{fixes.get(type(seed).__name__, '')}"]
    if is_known and (tuple(seed.shape) or seed.dtype not in SEED_DTYPES):
        return [f"seed must be a 0-d array of int64 or uint64; got {describe(seed)}: use np.array(3), for example"]
    return []


def _are_ints(value: Array) -> bool:
    return is_array(value) and value.ndim == 1 and value.dtype.kind in "iu"


def _are_positions(value: Array, length: int) -> bool:
    return _are_ints(value) and bool(((value >= 0) & (value < length)).all())


def _describe_positions(value: Array) -> str:
    return f"{value.min()}..{value.max()}" if _are_ints(value) else describe(value)
