"""Rotations of queries and keys before quantization: random signs, then a Hadamard matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..arrays import Array, describe, is_int, namespace, of_list, require_arrays
from ..errors import UnsupportedProblem, refuse
from ..keywords import explains_keywords
from ..planning.problem import MAX_HEAD_DIM


@explains_keywords
@dataclass(frozen=True, slots=True)
class Rotation:
    """An orthogonal matrix that spreads an outlier of a row over the whole row.

    Rows are multiplied by random signs and then by a Hadamard matrix. The same rotation of queries and keys does not
    change scores. Rounding to FP8 loses less if all numbers of a row have similar magnitudes than if one is an outlier.

    Parameters
    ----------
    head_dim : int
        Length of the rows, a power of two, at most 256.
    seed : int
        Seed of the signs; equal seeds give equal signs on every machine.

    Raises
    ------
    UnsupportedProblem
        head_dim is not a power of two from 1 to 256, or seed is not an int of at least 0.

    Notes
    -----
    This is the incoherent processing of FlashAttention-3, arXiv 2407.08608, section 3.3. The matrix is applied in
    log2(head_dim) steps of sums and differences in float32, which give the same bits for NumPy and CuPy arrays. Rows
    with very large numbers are divided by 2^8 during the sums, so that a result is infinite only if it exceeds the
    range of the dtype.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rotation = cuflash.Rotation(4)
    >>> spread = rotation.apply(np.float32([[0, 8, 0, 0]]))
    >>> np.abs(spread)
    array([[4., 4., 4., 4.]], dtype=float32)
    >>> rotation.undo(spread) + 0                                       # + 0 removes the signs of zeros
    array([[0., 8., 0., 0.]], dtype=float32)
    """

    head_dim: int
    seed: int = 0

    def __post_init__(self) -> None:
        reasons = []
        dim = self.head_dim
        if not is_int(dim) or not 1 <= dim <= MAX_HEAD_DIM or dim & dim - 1:
            reasons.append(
                f"head_dim must be a power of two from 1 to {MAX_HEAD_DIM} for a rotation; got {describe(dim)}: "
                f"quantize with rotate=None"
            )
        if not is_int(self.seed) or self.seed < 0:
            reasons.append(f"seed must be an int of at least 0; got {describe(self.seed)}: use 0, for example")
        refuse(reasons)
        object.__setattr__(self, "head_dim", int(dim))
        object.__setattr__(self, "seed", int(self.seed))

    @property
    def signs(self) -> Array:
        """The random signs, 1 or -1, as a NumPy array of float32.

        Examples
        --------
        >>> import cuflash
        >>> cuflash.Rotation(8, seed=0).signs.shape
        (8,)
        """
        bits = np.random.PCG64(self.seed).random_raw(self.head_dim) >> np.uint64(63)
        return np.where(bits, np.float32(-1), np.float32(1))

    def apply(self, x: Array) -> Array:
        """Rotate rows.

        Parameters
        ----------
        x : array [..., head_dim]
            A NumPy or CuPy array of rows. The computation is in float64 for float64 rows, otherwise in float32.

        Returns
        -------
        array
            The rotated rows, as float32 or float64.

        Raises
        ------
        TypeError, UnsupportedProblem
            x is not an array, or its rows do not have length `head_dim`.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> x = np.random.default_rng(0).standard_normal((3, 64))
        >>> y = cuflash.Rotation(64, seed=1).apply(x)
        >>> bool(np.allclose(x @ x.T, y @ y.T))
        True
        """
        wide = self._wide(x)
        return self._hadamard(wide * namespace(x).asarray(self.signs, wide.dtype))

    def undo(self, x: Array) -> Array:
        """Rotate rows back.

        Parameters
        ----------
        x : array [..., head_dim]
            Rotated rows, for example those that `apply` returned.

        Returns
        -------
        array
            The rows before the rotation, as float32 or float64.

        Raises
        ------
        TypeError, UnsupportedProblem
            x is not an array, or its rows do not have length `head_dim`.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> rotation = cuflash.Rotation(16)
        >>> bool((rotation.undo(rotation.apply(np.arange(16.0))) == np.arange(16)).all())
        True
        """
        wide = self._hadamard(self._wide(x))
        return wide * namespace(x).asarray(self.signs, wide.dtype)

    def _wide(self, x: Array) -> Array:
        x = of_list("x", x, np.float64)
        require_arrays({"x": x})
        if x.ndim == 0 or x.shape[-1] != self.head_dim:
            raise UnsupportedProblem(
                f"x must have rows of {self.head_dim} numbers, the rotation's head_dim; got {describe(x)}: "
                f"use a Rotation of their length"
            )
        return x.astype(np.float64 if x.dtype == np.float64 else np.float32)

    @np.errstate(all="ignore")
    def _hadamard(self, x: Array) -> Array:
        xp = namespace(x)
        units = large_units(xp.abs(x).max(axis=-1, keepdims=True))
        y = x / units
        half = 1
        while half < self.head_dim:
            pairs = y.reshape(*x.shape[:-1], self.head_dim // (2 * half), 2, half)
            y = xp.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2)
            half *= 2
        return y.reshape(x.shape) * x.dtype.type(1 / math.sqrt(self.head_dim)) * units


def large_units(magnitude: Array) -> Array:
    """Return 2^8 for magnitudes that are NaN, or so large that a sum of 256 of them may overflow; otherwise 1.

    Examples
    --------
    >>> import numpy as np
    >>> large_units(np.float32([1, 1e36, np.nan]))
    array([  1., 256., 256.], dtype=float32)
    """
    dtype = magnitude.dtype.type
    return namespace(magnitude).where(magnitude < dtype(2.0 ** (np.finfo(dtype).maxexp - 9)), dtype(1), dtype(256))
