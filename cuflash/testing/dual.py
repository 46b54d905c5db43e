"""Dual numbers: forward-mode differentiation of functions that use NumPy operations.

>>> import numpy as np
>>> x = Dual(np.array([0.0, 1.0]), {"x": np.ones(2)})
>>> y = 3 * np.tanh(x) + x**2
>>> y.tangents["x"].round(3)
array([3.  , 3.26])
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from ..arrays import Array


class Dual:
    """Values of a function with their derivatives with respect to several variables.

    Attributes
    ----------
    value : array
        The values.
    tangents : dict
        The derivatives of the values with respect to each variable, whose name is a hashable key.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Array, tangents: Mapping[Hashable, Array]) -> None:
        self.value, self.tangents = np.asarray(value), dict(tangents)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Array, **options: Array) -> Array:
        assert method == "__call__" and not options, (ufunc, method, options)
        values = [x.value if isinstance(x, Dual) else x for x in inputs]
        if ufunc not in _SLOPES:
            return ufunc(*values)  # comparisons and other operations without a derivative
        result = ufunc(*values)
        slopes = _SLOPES[ufunc](result, *values)
        return Dual(result, _sum(*(_scaled(x, slope) for x, slope in zip(inputs, slopes))))

    def __array_function__(
        self, function: Callable[..., Array], types: Sequence[type], args: Sequence[Array], options: Mapping[str, Array]
    ) -> Array:
        if function is np.clip:
            x, low, high = args
            return np.minimum(np.maximum(x, low), high)
        assert function is np.where and not options, function
        condition, *branches = args
        condition = condition.value if isinstance(condition, Dual) else condition
        result = np.where(condition, *(x.value if isinstance(x, Dual) else x for x in branches))
        first, second = (x.tangents if isinstance(x, Dual) else {} for x in branches)
        chosen = {key: np.where(condition, first.get(key, 0), second.get(key, 0)) for key in {**first, **second}}
        return Dual(result, chosen)


def _operator(ufunc: np.ufunc, *, is_swapped: bool = False) -> Callable[..., Array]:
    def operator(self: Dual, *others: Array) -> Array:
        return ufunc(*others, self) if is_swapped else ufunc(self, *others)

    return operator


_OPERATORS: dict[str, np.ufunc] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "pow": np.power,
    "floordiv": np.floor_divide, "mod": np.remainder, "neg": np.negative, "abs": np.absolute, "lt": np.less,
    "le": np.less_equal, "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
for _name, _ufunc in _OPERATORS.items():
    setattr(Dual, f"__{_name}__", _operator(_ufunc))
    setattr(Dual, f"__r{_name}__", _operator(_ufunc, is_swapped=True))


# The derivatives of a result r with respect to each argument.
_SLOPES: dict[np.ufunc, Callable[..., tuple[Array, ...]]] = {
    np.add: lambda r, x, y: (1, 1),
    np.subtract: lambda r, x, y: (1, -1),
    np.multiply: lambda r, x, y: (y, x),
    np.divide: lambda r, x, y: (1 / y, -x / y / y),
    np.power: lambda r, x, y: (
        np.where(np.equal(y, 0), 0, y * np.power(x, y - 1.0)),
        r * np.log(np.where(np.equal(x, 0), 1, x).astype(r.dtype)),
    ),
    np.negative: lambda r, x: (-1,),
    np.absolute: lambda r, x: (np.sign(x),),
    np.square: lambda r, x: (2 * x,),
    np.reciprocal: lambda r, x: (-r * r,),
    np.sqrt: lambda r, x: (0.5 / r,),
    np.exp: lambda r, x: (r,),
    np.exp2: lambda r, x: (r * np.log(np.asarray(2, r.dtype)),),
    np.log: lambda r, x: (1 / x,),
    np.log2: lambda r, x: (1 / (x * np.log(np.asarray(2, r.dtype))),),
    np.tanh: lambda r, x: (1 / np.cosh(x) ** 2,),
    np.arctan: lambda r, x: (np.cos(r) ** 2,),
    np.sign: lambda r, x: (0,),
    np.minimum: lambda r, x, y: (np.less_equal(x, y), np.greater(x, y)),
    np.maximum: lambda r, x, y: (np.greater_equal(x, y), np.less(x, y)),
}


def _scaled(x: Array, slope: Array) -> dict[Hashable, Array]:
    """Multiply the tangents of an argument by a slope; a tangent of 0 stays 0 even if the slope is infinite."""
    if not isinstance(x, Dual):
        return {}
    return {key: np.where(np.equal(tangent, 0), 0, tangent * slope) for key, tangent in x.tangents.items()}


def _sum(*tangents: dict[Hashable, Array]) -> dict[Hashable, Array]:
    total: dict[Hashable, Array] = {}
    for each in tangents:
        for key, tangent in each.items():
            total[key] = total[key] + tangent if key in total else tangent
    return total


def _is_same(index: Array, other: Array) -> bool:
    """True if two indices select the same elements."""
    first, second = (each if isinstance(each, tuple) else (each,) for each in (index, other))
    return len(first) == len(second) and all(map(np.array_equal, first, second))


class Captured:
    """A captured array of a score function, in which each index that is read is a separate variable.

    Parameters
    ----------
    array : real array
        The elements.

    Examples
    --------
    >>> import numpy as np
    >>> table = Captured(np.array([1.0, 2.0, 3.0]))
    >>> f = table[np.array([0, 2, 2])] ** 2
    >>> table.gradient(f, np.ones(3))
    array([ 2.,  0., 12.])
    """

    def __init__(self, array: Array) -> None:
        self.array = array
        self._reads: list[Array] = []

    def read(self) -> Captured | Dual:
        """Return the argument of a user's function: this array, or its only element if the array is 0-d."""
        return self if self.array.ndim else self[()]

    def __getitem__(self, index: Array) -> Dual:
        """Read elements; equal indices give the same variable, so that their derivatives can cancel exactly."""
        known = [number for number, each in enumerate(self._reads) if _is_same(each, index)]
        if not known:
            known = [len(self._reads)]
            self._reads.append(index)
        value = self.array[index]
        return Dual(value, {(id(self), known[0]): np.ones_like(value)})

    def gradient(self, f: Dual, df: np.ndarray) -> np.ndarray:
        """Return the gradient of sum(df * f) with respect to the elements; terms with df = 0 count as 0."""
        total = np.zeros(self.array.shape, self.array.dtype)
        positions = np.arange(self.array.size).reshape(self.array.shape)
        for number, index in enumerate(self._reads):
            tangent = f.tangents.get((id(self), number), 0)
            with np.errstate(invalid="ignore"):
                terms = np.where(df == 0, 0, df * tangent)
            np.add.at(total.reshape(-1), np.broadcast_to(positions[index], terms.shape), terms)
        return total
