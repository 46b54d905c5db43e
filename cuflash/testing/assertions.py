"""Assertions about the results of an attention function, in three tiers, over one record of operands.

=====  ============================================  ======================================================
tier   asks                                          sees
=====  ============================================  ======================================================
R      `assert_within_bounds`: every element of o,   most faults; a bound that the inputs themselves set
       lse, dq, dk, dv within `error_bound`
L      the same with lse alone                       one key too many, too few or wrong, at any magnitude
E      `assert_exact_probes`: inputs whose results   which keys a row reads; accumulators that are too
       are known to the last rounding                narrow, which hide from R at long lengths
=====  ============================================  ======================================================

Each returns the largest error as a share of its bound, to record, or to steer Hypothesis with `hypothesis.target`.
No tolerance is typed: each follows from roundings that can be counted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, Protocol, SupportsInt

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import BFLOAT16, Array, accumulator_dtype, describe
from ..bounds import Bounds, error_bound
from ..bounds.rounding import limits
from ..dropout import Dropout
from ..keywords import explains_keywords
from ..masks.base import Mask
from ..masks.content import without_memos
from ..planning.problem import Problem
from ..scores.score import Score
from ..scores.trace import shifted_by
from . import oracle

__all__ = [
    "Attend",
    "Example",
    "assert_exact_probes",
    "assert_lse_counts_the_keys",
    "assert_mask_is_the_one_asked_for",
    "assert_means_are_exact",
    "assert_ones_stay_ones",
    "assert_wide_accumulators",
    "assert_within",
    "assert_within_bounds",
]

_RESULTS = ("o", "lse", "dq", "dk", "dv", "dsink")
_ROUNDED = ("o", "lse", "dq", "dk", "dv")  # to the operands' dtype, or to that of sums


class Attend(Protocol):
    """A forward pass under test: arrays in the layout of `cuflash.attention`, the mask a bool array or None."""

    def __call__(
        self, q: Array, k: Array, v: Array, *, mask: np.ndarray | None, scale: float | None
    ) -> tuple[Array, Array]:
        """o and lse."""


@explains_keywords
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """Operands of one call, with the exact answer and the bounds on it.

    Parameters
    ----------
    q, k, v, do, dlse, sink : array
        As in `cuflash.attention_vjp`; `do`, `dlse` and `sink` may be None.
    mask : Mask, bool array or None
        As in `cuflash.attention`.
    scale : float or None
        As in `cuflash.attention`.
    score : Score, optional
        As in `cuflash.attention`.
    dropout : Dropout, optional
        As in `cuflash.attention`.
    wrt : tuple of str
        Names of the score's arrays that have gradients.
    precision : str
        The precision at which the implementation under test multiplies; see `cuflash.error_bound`.
    product_dtype : dtype, optional
        The dtype that the implementation under test rounds P and dS to; see `cuflash.error_bound`.
    origin : str
        The repr: source text for this example. It can be run again where the mask's repr can.

    Examples
    --------
    >>> import numpy as np
    >>> example = Example(q=np.zeros((2, 4)), k=np.ones((3, 4)), v=np.eye(3), mask=np.eye(2, 3, dtype=bool))
    >>> example.exact.o.astype(int)
    array([[1, 0, 0],
           [0, 1, 0]])
    >>> example.but(scale=2.0).scale
    2.0
    """

    q: Array
    k: Array
    v: Array
    do: Array = None
    dlse: Array = None
    sink: Array = None
    mask: Array | Mask | None = None
    scale: float | None = None
    score: Score | None = None
    dropout: Dropout | None = None
    wrt: tuple[str, ...] = ()
    precision: str = "ieee"
    product_dtype: DTypeLike | None = None
    origin: str = ""

    def __getstate__(self) -> Any:
        return without_memos(self)

    def but(self, **changes: Any) -> Example:
        """Copy the example with some operands replaced.

        Parameters
        ----------
        **changes : object
            New values by the names of the parameters.

        Returns
        -------
        Example
            The changed copy.

        Examples
        --------
        >>> import numpy as np
        >>> example = Example(q=np.zeros((1, 4)), k=np.ones((2, 4)), v=np.eye(2), mask=np.array([[True, False]]))
        >>> example.but(scale=2.0).scale
        2.0
        """
        origin = f"{self.origin}.but({', '.join(changes)})" if self.origin else ""
        return dataclasses.replace(self, **{"origin": origin, **changes})

    @functools.cached_property
    def problem(self) -> Problem:
        return Problem.of(self.q, self.k, self.v, scale=self.scale)

    @functools.cached_property
    def dense_mask(self) -> Array:
        """The mask as a bool array [*batch, num_heads, seqlen_q, seqlen_kv], 2-D for 2-D operands; None without one.

        Examples
        --------
        >>> import numpy as np
        >>> example = Example(q=np.zeros((1, 4)), k=np.ones((2, 4)), v=np.eye(2), mask=np.array([[True, False]]))
        >>> example.dense_mask
        array([[ True, False]])
        """
        if self.mask is None:
            return None
        shape = self.problem.mask_shape
        if isinstance(self.mask, Mask):
            full = self.mask.toarray(**shape._asdict())
        else:
            full = np.broadcast_to(self.mask, (*shape.batch, *shape[1:]))
        return full if self.problem.has_heads else full[0]

    @property
    def allowed(self) -> Array:
        """The mask as a bool array, all True where there is no mask.

        Examples
        --------
        >>> import numpy as np
        >>> example = Example(q=np.zeros((1, 4)), k=np.ones((2, 4)), v=np.eye(2), mask=np.array([[True, False]]))
        >>> example.but(mask=None).allowed
        array([[ True,  True]])
        """
        shape = (*self.problem.lse_shape(), self.problem.seqlen_kv)
        return np.ones(shape, bool) if self.mask is None else self.dense_mask

    @property
    def weight_factors(self) -> Array:
        """Return dropout's factors of weights, [*batch, num_heads, seqlen_q, seqlen_kv]; None without dropout.

        Examples
        --------
        >>> import numpy as np
        >>> example = Example(q=np.zeros((1, 4)), k=np.ones((2, 4)), v=np.eye(2))
        >>> example.but(dropout=Dropout(0.5, seed=1)).weight_factors
        array([[[2., 0.]]])
        """
        if self.dropout is None:
            return None
        shape = self.problem.mask_shape
        return self.dropout.keep((*shape.batch, *shape[1:])) * self.dropout.draws.factor

    @functools.cached_property
    def exact(self) -> Bounds:
        """The oracle's o and lse, and with `do` its dq, dk and dv, under the names that the bounds have.

        Examples
        --------
        >>> import numpy as np
        >>> example = Example(q=np.zeros((1, 4)), k=np.ones((2, 4)), v=np.eye(2), mask=np.array([[True, False]]))
        >>> example.exact.o.astype(float)
        array([[1., 0.]])
        """
        changed = {"score": self.score, "weight_factors": self.weight_factors}
        with shifted_by(self.k.shape[-2] - self.q.shape[-2]):
            o, lse = oracle.attention(self.q, self.k, self.v, self.dense_mask, self.scale, self.sink, **changed)
        if self.do is None:
            return Bounds(o=o, lse=lse)
        operands = self.q, self.k, self.v, self.do, self.dlse, self.dense_mask, self.scale, self.sink
        with shifted_by(self.k.shape[-2] - self.q.shape[-2]):
            dq, dk, dv, *others = oracle.attention_vjp(*operands, wrt=self.wrt, **changed)
        dsink = None if self.sink is None else others.pop(0)
        return Bounds(o=o, lse=lse, dq=dq, dk=dk, dv=dv, dsink=dsink, others=dict(zip(self.wrt, others)))

    @functools.cached_property
    def bounds(self) -> Bounds:
        """The bounds of `cuflash.error_bound` for these operands.

        Examples
        --------
        >>> import numpy as np
        >>> example = Example(q=np.zeros((1, 4)), k=np.ones((2, 4)), v=np.eye(2), mask=np.array([[True, False]]))
        >>> example.bounds.o.shape
        (1, 2)
        """
        return self._bounds(probable=False)

    @functools.cached_property
    def probable_bounds(self) -> Bounds:
        """Bounds for rounding errors that do not all point one way, for thousands of keys.

        Examples
        --------
        >>> import numpy as np
        >>> example = Example(q=np.zeros((1, 4)), k=np.ones((2, 4)), v=np.eye(2), mask=np.array([[True, False]]))
        >>> bool((example.probable_bounds.o <= example.bounds.o).all())
        True
        """
        return self._bounds(probable=True)

    def _bounds(self, probable: bool) -> Bounds:
        return error_bound(
            self.q,
            self.k,
            self.v,
            self.do,
            dlse=self.dlse,
            mask=self.dense_mask,
            scale=self.scale,
            score=self.score,
            wrt=self.wrt,
            sink=self.sink,
            dropout=self.dropout,
            precision=self.precision,
            product_dtype=self.product_dtype,
            probable=probable,
        )

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={getattr(self, name).shape}" for name in "qkv")
        return self.origin or f"Example({shapes}, dtype={self.q.dtype}, mask={self.mask!r}, scale={self.scale})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Give Hypothesis the repr; it would write out every array."""
        printer.text(repr(self))


# Tiers R and L


@explains_keywords
def assert_within_bounds(
    example: Example,
    *,
    o: Array = ...,
    lse: Array = ...,
    dq: Array = ...,
    dk: Array = ...,
    dv: Array = ...,
    dsink: Array = ...,
    others: Mapping[str, Array] | EllipsisType = ...,
    probable: bool = False,
) -> float:
    """Assert that every element of the given results is within its bound of the exact one.

    Parameters
    ----------
    example : Example
        The operands, which hold the exact results and the bounds.
    o, lse, dq, dk, dv, dsink : array, optional
        Results of the implementation under test; at least one, or `others`. Gradients need an example with `do`.
    others : dict of arrays by name, optional
        Gradients of the score's arrays.
    probable : bool
        Use the sharper `probable` bounds.

    Returns
    -------
    float
        The largest error as a share of its bound.

    Raises
    ------
    AssertionError
        Names the worst element, the first wrong one and the example. A result of another shape, or of a dtype that
        holds less than the example's, fails too.
    TypeError
        No result came, or one that is not an array, such as the None of a function that returns nothing, or one for
        which the example lacks an operand.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = (np.array(x, np.float32) for x in ([[0, 0]], [[1, 1], [2, 2]], [[1], [2]]))
    >>> example = Example(q=q, k=k, v=v)
    >>> assert_within_bounds(example, o=np.array([[1.5]]))
    0.0
    >>> assert_within_bounds(example, lse=np.array([0.5]))
    Traceback (most recent call last):
        ...
    AssertionError: lse[0] is 0.5, should be 0.6931471805599453: off by 0.193, 1.3e+05 times its bound of 1.5e-06
    1 of 1 elements are outside their bounds, the first at lse[0]
    Example(q=(1, 2), k=(2, 2), v=(2, 1), dtype=float32, mask=None, scale=None)
    """
    __tracebackhide__ = True
    named = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dsink": dsink}
    results = {name: result for name, result in named.items() if result is not ...}
    gradients = {} if isinstance(others, EllipsisType) else others
    require_results(example, results, gradients)
    bounds = example.probable_bounds if probable else example.bounds
    share = 1.0 if reference_is_finer(example.q.dtype) else 2.0
    ratios = []
    for name, result in results.items():
        exact = getattr(example.exact, name)
        found = as_result(name, result, exact.shape, example)
        ratios.append(assert_within(name, found, exact, share * getattr(bounds, name), example))
    for name, result in gradients.items():
        exact = example.exact.others[name]
        found = as_result(f"d{name}", result, exact.shape, example)
        ratios.append(assert_within(f"d{name}", found, exact, share * bounds.others[name], example))
    return max(ratios)


def require_results(example: Example, results: Mapping[str, Array], others: Mapping[str, Array] | EllipsisType) -> None:
    """Refuse to compare nothing, and results for which an example has no exact answer.

    Raises
    ------
    TypeError
        There is no result, or the example lacks an operand of one.
    """
    if not isinstance(others, Mapping):
        raise TypeError(f"others must be a dict of the score's gradients by name; got {describe(others)}")
    if not results and not others:
        raise TypeError(f"give at least one of {', '.join(_RESULTS)}, others: nothing would be compared")
    if unknown := [name for name in results if name not in _RESULTS]:
        raise TypeError(f"results are {', '.join(_RESULTS)}; got {', '.join(unknown)}")
    gradients = [name for name in results if name.startswith("d")] + [f"d{name}" for name in others]
    reasons = [f"{name} needs an example with do" for name in gradients if example.do is None]
    reasons += ["dsink needs an example with sink"] * ("dsink" in results and example.sink is None)
    reasons += [f"d{name} needs an example with {name} in wrt" for name in others if name not in example.wrt]
    if reasons:
        raise TypeError("; ".join(reasons))


def as_pair(results: Any, example: Example) -> tuple[np.ndarray, np.ndarray]:
    """o and lse of a function under test as NumPy's arrays, of an example's shapes; see `as_results`."""
    __tracebackhide__ = True
    problem = example.problem
    o, lse = as_results(results, {"o": problem.o_shape(), "lse": problem.lse_shape()}, example)
    return o, lse


def as_results(results: Any, shapes: Mapping[str, Sequence[int]], example: Example) -> list[np.ndarray]:
    """Return what a function under test returned as NumPy's arrays, of the given names and shapes.

    Raises
    ------
    TypeError
        It returned something else than one array for each name.
    AssertionError
        An array has another shape, or a dtype that holds less than the example's.
    """
    __tracebackhide__ = True
    several = isinstance(results, (tuple, list))
    if several and len(results) == len(shapes) and all(hasattr(each, "shape") for each in results):
        return [as_result(name, result, shape, example) for (name, shape), result in zip(shapes.items(), results)]
    came = _came(results)
    if several:
        came = f"{type(results).__name__} of {len(results)}: {', '.join(map(_came, results[:4]))}"
    raise TypeError(f"the function under test must return ({', '.join(shapes)}); got {came}")


def _came(result: Any) -> str:
    return f"one array of shape {tuple(result.shape)}" if hasattr(result, "shape") else describe(result)


def as_result(name: str, result: Array, shape: Sequence[int], example: Example) -> np.ndarray:
    """Return one result as NumPy's array; it must have its shape, and a dtype that holds what the example's does."""
    __tracebackhide__ = True
    if result is None:
        raise TypeError(f"{name} must be an array; got None: the function under test must return it")
    try:
        array = np.asarray(result)
    except Exception as error:  # arrays of other libraries refuse in their own ways
        told = str(error).partition("\n")[0]
        raise TypeError(f"{name} must be an array that NumPy reads; got {type(result).__name__}: {told}") from error
    assert array.shape == tuple(shape), f"{name} has shape {array.shape}, should have {tuple(shape)}\n{example}"
    least = np.dtype(example.q.dtype)
    least = accumulator_dtype(least) if name == "lse" else least
    is_wide = _is_float(array.dtype) and (name not in _ROUNDED or limits(array.dtype).eps <= limits(least).eps)
    assert is_wide, f"{name} has dtype {array.dtype}, should have {least} or a wider one\n{example}"
    return array


def _is_float(dtype: np.dtype) -> bool:
    """Return whether a dtype is one of real numbers with fractions, NumPy's or bfloat16."""
    return dtype.kind == "f" or dtype == BFLOAT16


def reference_is_finer(dtype: DTypeLike) -> bool:
    """False for float64 where long double is float64 too: then the oracle errs as much as the result may."""
    return bool(np.finfo(np.longdouble).eps < limits(accumulator_dtype(np.dtype(dtype))).eps)


@explains_keywords
def assert_within(
    name: str, actual: np.ndarray, exact: np.ndarray, bound: np.ndarray | float, context: object = ""
) -> float:
    """Assert that every element of an array is within its bound of the exact one.

    Infinities must agree; NaN agrees with NaN alone. An infinite bound lets everything pass.

    Parameters
    ----------
    name : str
        The array's name in the message.
    actual, exact : array
        The array, and what it should be.
    bound : array
        How far each element may be off; broadcasts.
    context : object
        What the message ends with.

    Returns
    -------
    float
        The largest error as a share of its bound.

    Raises
    ------
    AssertionError
        An element is outside its bound. The message names the worst and the first.

    Examples
    --------
    >>> import numpy as np
    >>> assert_within("x", np.array([1.0, 3.0]), np.array([1.5, 3.0]), np.array([2.0, 0.0]))
    0.25
    """
    __tracebackhide__ = True
    actual, exact = np.asarray(actual), np.asarray(exact)
    for each in (actual, exact):
        if not (_is_float(each.dtype) or each.dtype.kind in "iu"):
            raise TypeError(f"{name} must be an array of real numbers; got {describe(each)}")
    assert actual.shape == exact.shape, f"{name} has shape {actual.shape}, should have {exact.shape}\n{context}"
    bound = np.broadcast_to(bound, exact.shape)
    error, ratio = _errors(actual, exact, bound)
    outside = ~(ratio <= 1)
    if not outside.any():
        return float(ratio.max(initial=0.0))
    worst = np.unravel_index(np.argmax(ratio), ratio.shape)
    first = np.unravel_index(np.argmax(outside), ratio.shape)
    raise AssertionError(
        f"{_element(name, worst)} is {float(actual[worst])!r}, should be {float(exact[worst])!r}: "
        f"off by {float(error[worst]):.3g}, {_times(ratio[worst])} times its bound of {float(bound[worst]):.2g}\n"
        f"{outside.sum()} of {outside.size} elements are outside their bounds, the first at {_element(name, first)}\n"
        f"{context}"
    )


def _errors(actual: np.ndarray, exact: np.ndarray, bound: np.ndarray | float) -> tuple[Array, Array]:
    """|actual - exact| and its share of the bound."""
    wide = np.longdouble if np.longdouble in (actual.dtype, exact.dtype) else np.float64
    actual, exact = actual.astype(wide), exact.astype(wide)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        agrees = (actual == exact) | (np.isnan(actual) & np.isnan(exact))
        error = np.where(agrees, 0, np.abs(actual - exact))
        error = np.where(np.isnan(error), np.inf, error)
        ratio = np.where(agrees | np.isposinf(bound), 0, error / bound)
    return error, np.where(np.isnan(ratio), np.inf, ratio)


def _times(ratio: float) -> str:
    """A share above 1, with two digits, or as many as show that it is above 1."""
    texts = (f"{float(ratio):.{digits}g}" for digits in range(2, 18))
    return next((text for text in texts if float(text) > 1), "barely more than 1")


def _element(name: str, place: tuple[SupportsInt, ...]) -> str:
    return f"{name}[{', '.join(str(int(index)) for index in place)}]"


# Tier E


@explains_keywords
def assert_exact_probes(attend: Attend, example: Example) -> float:
    """Assert that an implementation gives the known answer for inputs of which it is exact.

    Every probe of this module runs, with the shapes, dtype and mask of an example.

    Parameters
    ----------
    attend : callable
        The function under test, `(q, k, v, *, mask, scale) -> (o, lse)`.
    example : Example
        Its shapes, dtype and mask are used, and where a probe says so its values.

    Returns
    -------
    float
        The largest error as a share of its bound.

    Raises
    ------
    AssertionError
        Names the probe, the first wrong element and the example.

    Examples
    --------
    >>> import cuflash, numpy as np
    >>> def attend(q, k, v, *, mask, scale):
    ...     return cuflash.attention(q, k, v, mask=mask, scale=scale, return_lse=True)
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4), dtype=np.float32)
    >>> assert_exact_probes(attend, Example(q=q, k=k, v=v)) <= 1
    True
    """
    __tracebackhide__ = True
    probes = (
        assert_lse_counts_the_keys,
        assert_ones_stay_ones,
        assert_mask_is_the_one_asked_for,
        assert_means_are_exact,
    )
    return max([probe(attend, example) for probe in probes] + [assert_wide_accumulators(attend, example.q.dtype)])


@explains_keywords
def assert_lse_counts_the_keys(attend: Attend, example: Example) -> float:
    """With q = 0 every weight is 1, so lse is log(number of keys), whatever k holds.

    Tells n keys from n - 1 up to half a million keys in float32: the sum is exact, and four roundoffs (two for the
    logarithm, one for a change of base, one for its constant) are all that is left.
    """
    __tracebackhide__ = True
    lse = _with_zero_scores(attend, example, example.v)[1]
    exact = _logarithm(_key_counts(example))
    return assert_within("lse", lse, exact, 4 * _roundoffs(example)[1] * np.abs(exact), _probe("q = 0", example))


@explains_keywords
def assert_ones_stay_ones(attend: Attend, example: Example) -> float:
    """With q = 0 and v = 1, o is 1 to one last place, and 0 in a row without keys."""
    __tracebackhide__ = True
    o = _with_zero_scores(attend, example, np.ones_like(example.v))[0]
    exact = np.broadcast_to(_key_counts(example)[..., None] > 0, o.shape).astype(np.float64)
    return assert_within("o", o, exact, 2 * _roundoffs(example)[0], _probe("q = 0, v = 1", example))


@explains_keywords
def assert_mask_is_the_one_asked_for(attend: Attend, example: Example) -> float:
    """With q = 0 and v[j] the unit vector of a digit of j, o counts a row's keys by that digit: the mask, decoded.

    Two probes, for both digits of j in base value_dim: every key up to value_dim ** 2 has its own pair. Each element is
    a quotient of two integers, rounded twice in the accumulator (division may multiply by the reciprocal) and once in
    the storage dtype.
    """
    __tracebackhide__ = True
    value_dim = example.v.shape[-1]
    key = np.arange(example.k.shape[-2])
    ratios = []
    for digit in (key % value_dim, key // value_dim % value_dim):
        v = np.broadcast_to(np.eye(value_dim)[digit], example.v.shape).astype(example.v.dtype)
        o = _with_zero_scores(attend, example, v)[0]
        exact = _mean(example, np.eye(value_dim)[digit])
        ratios.append(
            assert_within("o", o, exact, _two_roundings(example, exact), _probe("q = 0, v = digits", example))
        )
    return max(ratios)


@explains_keywords
def assert_means_are_exact(attend: Attend, example: Example) -> float:
    """With q = 0 and integers in v, o is their mean over the row's keys: only the division and the store round."""
    __tracebackhide__ = True
    v = on_lattice(example.v)
    o = _with_zero_scores(attend, example, v)[0]
    group = example.problem.group_size
    values = np.repeat(v, group, axis=-3) if v.ndim > 2 else v
    exact = _mean(example, values)
    return assert_within("o", o, exact, _two_roundings(example, exact), _probe("q = 0, v = integers", example))


@explains_keywords
def assert_wide_accumulators(attend: Attend, dtype: DTypeLike) -> float:
    """A staircase that narrow sums climb wrongly: one key of weight 1, then 8192 keys of a weight far below.

    The small weights are 2^-19 in float16 and 2^-15 in bfloat16, under half a last place of 1, and v = 1: o is 1
    exactly. An accumulator of the storage dtype loses all of them, and gives 0.98 and 0.8; a denominator of that dtype
    gives 1.02 and 1.25. float32 and float64 accumulate in their own dtype and pass by nature.
    """
    __tracebackhide__ = True
    step = {"float16": 19, "bfloat16": 15}.get(np.dtype(dtype).name)
    if step is None:
        return 0.0
    q, k, v = np.zeros((1, 1, 8)), np.zeros((1, 8193, 8)), np.ones((1, 8193, 8))
    q[..., 0], k[:, 1:, 0] = 1, -step
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    example = Example(q=q, k=k, v=v, scale=float(np.log(2)))
    o, _ = as_pair(attend(example.q, example.k, example.v, mask=None, scale=example.scale), example)
    return assert_within("o", o, np.ones(o.shape), 2 * _roundoffs(example)[0], _probe("staircase", example))


def on_lattice(x: Array) -> Array:
    """The array rounded to the integers -2..2: exact in every dtype, and so are its short sums and products."""
    return np.clip(np.rint(x.astype(np.float64)), -2, 2).astype(x.dtype)


def _with_zero_scores(attend: Attend, example: Example, v: Array) -> tuple[np.ndarray, np.ndarray]:
    q, k = np.zeros_like(example.q), on_lattice(example.k)
    return as_pair(attend(q, k, v, mask=example.dense_mask, scale=example.scale), example)


def _key_counts(example: Example) -> Array:
    return np.count_nonzero(example.allowed, axis=-1)


def _mean(example: Example, values: np.ndarray) -> Array:
    """The mean of integer values over each row's keys; 0 in a row without keys."""
    total = example.allowed.astype(np.float64) @ values.astype(np.float64)
    return total / np.maximum(_key_counts(example), 1)[..., None].astype(np.longdouble)


def _logarithm(count: np.ndarray) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(count.astype(np.longdouble))


def _two_roundings(example: Example, exact: np.ndarray) -> Array:
    u, ua = _roundoffs(example)
    return (u + 2 * ua) * (1 + u) * np.abs(exact) + float(limits(np.dtype(example.q.dtype)).smallest_subnormal)


def _roundoffs(example: Example) -> tuple[float, float]:
    """Unit roundoffs of the storage dtype and of the accumulator."""
    dtype = np.dtype(example.q.dtype)
    return float(limits(dtype).eps) / 2, float(limits(accumulator_dtype(dtype)).eps) / 2


def _probe(inputs: str, example: Example) -> str:
    return f"with {inputs} in the place of {example!r}"
