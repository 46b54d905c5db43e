"""Random score functions: formulas of all supported operations, and the arrays that they capture.

>>> formula = Formula(("sub", ("s",), ("mul", ("load", "slope"), ("abs", ("sub", ("i",), ("j",))))))
>>> formula.names
('slope',)
>>> float(formula(0.0, 0, 0, 5, 3, slope=np.array([0.5])))
-1.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import DTypeLike

from ..arrays import Array
from ..masks.shape import MaskShape


Tree = tuple[Any, ...]
_BUCKETS = 6
_BUCKET = ("clip", ("load", "bucket"), ("number", 0), ("number", _BUCKETS - 1))
_NEAR = ("clip", ("sub", ("j",), ("i",)), ("number", -3), ("number", 3))


@dataclass(frozen=True)
class _Kind:
    """A captured array: the indices that read it ("..." is the batch), and lengths of axes that formulas index."""

    indices: tuple[Any, ...]
    dtype: str = "real"
    extents: tuple[int, ...] = ()


ARRAYS: dict[str, _Kind] = {
    "tau": _Kind(()),
    "slope": _Kind(("h",)),
    "entry": _Kind(("b",)),
    "row": _Kind(("h", "i")),
    "column": _Kind(("j",)),
    "plane": _Kind(("i", "j")),
    "matrix": _Kind(("...", "h", "i", "j")),
    "near": _Kind(("h", ("add", _NEAR, ("number", 3))), extents=(0, 7)),
    "table": _Kind((_BUCKET,), extents=(_BUCKETS,)),
    "bucket": _Kind(("j",), "int"),
    "flag": _Kind(("h", "i"), "bool"),
}
_REALS = [name for name, kind in ARRAYS.items() if kind.dtype == "real"]


def _log_or_0(x: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):  # np.log of negative numbers and 0, which np.where drops
        return np.where(x > 0, np.log(x), 0.0)


_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "clip": np.clip,
    "where": np.where,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "square": np.square,
    "tanh": np.tanh,
    "arctan": np.arctan,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "lt": np.less,
    "ge": np.greater_equal,
    "eq": np.equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "isfinite": np.isfinite,
    "divide": np.divide,
    "exp_tanh": lambda x: np.exp(np.tanh(x)),
    "exp2_tanh": lambda x: np.exp2(np.tanh(x)),
    "log": lambda x: np.log(1.0 + np.square(x)),
    "log2": lambda x: np.log2(0.5 + np.abs(x)),
    "log_or_0": _log_or_0,
    "sqrt": lambda x: np.sqrt(np.abs(x) + 0.25),
    "power": lambda x: (np.abs(x) + 0.5) ** 1.5,
    "power_of": lambda x, y: np.power(np.minimum(np.abs(x), 4), np.exp(np.tanh(y))),
    "over": lambda x, y: x / (1.0 + np.abs(y)),
    "reciprocal": lambda x: np.reciprocal(2.0 + np.square(x)),
}
UNARY = (
    "neg", "abs", "sign", "square", "tanh", "arctan", "exp_tanh", "exp2_tanh", "log", "log2", "log_or_0", "sqrt",
    "power", "reciprocal",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "min", "max")
_NUMBERS = (0.5, 2, 1, -1.0, 0, 0.75, 3, -1.25, 0.001)
_DIVISORS = (2.0, 4.0, -8.0, 0.25)  # powers of two, because their reciprocals are exact


@dataclass(frozen=True)
class Formula:
    """A score function in the form of a tree; use it as `Score(formula, **formula.arrays(...))`.

    Attributes
    ----------
    tree : tuple
        The name of an operation and its arguments; leaves are ("s",), ("b",), ("h",), ("i",), ("j",),
        ("number", value) and ("load", name of `ARRAYS`).
    """

    tree: Tree

    __name__ = "formula"

    def __call__(self, s: Array, b: Array, h: Array, i: Array, j: Array, **arrays: Array) -> Array:
        return _value(self.tree, {"s": s, "b": b, "h": h, "i": i, "j": j}, arrays)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays that the formula takes, in the order of `ARRAYS`."""
        names = _names(self.tree)
        return tuple(name for name in ARRAYS if name in names)

    def arrays(self, shape: MaskShape, seed: int, dtype: DTypeLike = np.float32) -> dict[str, np.ndarray]:
        """Return random arrays for a problem, from a generator with `seed`; some batch axes have length 1."""
        rng = np.random.default_rng(seed)
        return {name: _array(ARRAYS[name], shape, rng, dtype) for name in self.names}


@cache
def formulas(depth: int = 4) -> st.SearchStrategy[Formula]:
    """Return a strategy for formulas of at most this depth, most of which read the score."""
    trees = _reals(depth)
    with_score = st.builds(lambda tree, op: (op, ("s",), tree), _reals(depth - 1), st.sampled_from(("add", "mul")))
    return st.builds(Formula, with_score | trees)


@cache
def _reals(depth: int) -> st.SearchStrategy[Tree]:
    leaves = [
        st.just(("s",)),
        st.builds(lambda number: ("number", number), st.sampled_from(_NUMBERS)),
        st.builds(lambda name: ("load", name), st.sampled_from(_REALS)),
        st.builds(lambda tree: ("mul", ("number", 0.125), tree), _integers(1)),
    ]
    if depth <= 1:
        return st.one_of(*leaves)
    inner = _reals(depth - 1)
    unary = st.tuples(st.sampled_from(UNARY), inner)
    binary = st.tuples(st.sampled_from(BINARY), inner, inner)
    choice = st.tuples(st.just("where"), _conditions(depth - 1), inner, inner)
    quotient = st.builds(lambda tree, by: ("divide", tree, ("number", by)), inner, st.sampled_from(_DIVISORS))
    # Programs divide by a divisor that is not a constant. They multiply by the reciprocal of a constant, which gives
    # the same bits only for a power of two.
    over = st.builds(lambda tree, by: ("over", tree, ("add", ("s",), by)), inner, inner)
    # The base is an integer, which is 0 at equal positions and has no derivative; the exponent has a derivative.
    power = st.builds(lambda base, exponent: ("power_of", base, exponent), _integers(0), inner)
    return st.one_of(*leaves, unary, binary, choice, quotient, over, power)


@cache
def _integers(depth: int) -> st.SearchStrategy[Tree]:
    leaves = st.sampled_from([("b",), ("h",), ("i",), ("j",), ("sub", ("i",), ("j",)), _NEAR, _BUCKET])
    if depth <= 0:
        return leaves
    inner = _integers(depth - 1)
    binary = st.tuples(st.sampled_from(("add", "sub", "min", "max", "mul")), inner, inner)
    by_number = st.builds(
        lambda op, tree, by: (op, tree, ("number", by)), st.sampled_from(("floordiv", "mod")), inner, st.integers(1, 5)
    )
    return leaves | binary | by_number | st.tuples(st.sampled_from(("abs", "neg", "sign")), inner)


@cache
def _conditions(depth: int) -> st.SearchStrategy[Tree]:
    compare = st.sampled_from(("lt", "ge", "eq"))
    leaves = [
        st.tuples(compare, _integers(0), _integers(0)),
        st.just(("load", "flag")),
        st.builds(lambda tree: ("lt", tree, ("number", 0.3)), _reals(1)),
        st.builds(lambda tree: ("isfinite", tree), _reals(1)),
    ]
    if depth <= 1:
        return st.one_of(*leaves)
    inner = _conditions(1)
    return st.one_of(*leaves, st.tuples(st.sampled_from(("and", "or")), inner, inner), st.tuples(st.just("not"), inner))


def _names(tree: Tree) -> set[str]:
    """Return the names of the arrays that a tree reads, and that the indices of these arrays read."""
    op, *args = tree
    if op == "load":
        indices = [index for index in ARRAYS[args[0]].indices if isinstance(index, tuple)]
        return {args[0]}.union(*map(_names, indices))
    return set[str]().union(*(_names(arg) for arg in args if isinstance(arg, tuple)))


def _value(tree: Tree, at: Mapping[str, Array], arrays: Mapping[str, Array]) -> Array:
    op, *args = tree
    if op in at:
        return at[op]
    if op == "number":
        return args[0]
    if op != "load":
        return _FUNCTIONS[op](*(_value(arg, at, arrays) for arg in args))
    array, indices = arrays[args[0]], ARRAYS[args[0]].indices
    if not indices:
        return array
    own = [_value(index, at, arrays) if isinstance(index, tuple) else at.get(index, ...) for index in indices]
    return array[own[0] if len(own) == 1 else tuple(own)]


def _array(kind: _Kind, shape: MaskShape, rng: np.random.Generator, dtype: DTypeLike) -> np.ndarray:
    extent_of = {"b": shape.num_batch, "h": shape.num_heads, "i": shape.seqlen_q, "j": shape.seqlen_kv}
    extents: list[int] = []
    for place, index in enumerate(kind.indices):
        if index == "...":
            extents += [1 if number % 2 else extent for number, extent in enumerate(shape.batch)]
        elif isinstance(index, str):
            extents.append(extent_of[index])
        else:
            extents.append(kind.extents[place])
    if kind.dtype == "bool":
        return rng.random(extents) < 0.5
    if kind.dtype == "int":
        return rng.integers(0, _BUCKETS, extents).astype(rng.choice(["uint8", "int32", "int64"]))
    narrow = ml_dtypes.bfloat16 if rng.random() < 0.2 else np.float16
    return np.asarray(rng.standard_normal(extents)).astype(dtype if rng.random() < 0.7 else narrow)
