"""Assertions about the results of an attention function, in three tiers, and the record of operands that they take.

=====  ============================================  ======================================================
tier   checks                                        finds
=====  ============================================  ======================================================
R      `assert_within_bounds`: every element of o,   most faults, by a bound that is computed from the
       lse, dq, dk, dv is within `error_bound`       inputs
L      the same for lse only                         a key too many, too few or wrong, at any magnitude
E      `assert_exact_probes`: inputs whose results   rows that read wrong keys; accumulators that are too
       are known up to the last rounding             narrow, which tier R misses at long lengths
=====  ============================================  ======================================================

Each assertion returns the largest error divided by its bound, to record it, or as a `hypothesis.target`. There are no
tolerances to choose: each bound follows from a count of roundings.
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
from ..masks.content import Memoized
from ..planning.problem import Problem
from ..scores.score import Score
from ..scores.trace import shifted_by
from . import oracle


_RESULTS = ("o", "lse", "dq", "dk", "dv", "dsink")
_ROUNDED = ("o", "lse", "dq", "dk", "dv")  # results with the dtype of the operands or of the accumulator


class Attend(Protocol):
    """The signature of a forward pass under test, with arrays as in `cuflash.attention` and a bool mask or None."""

    def __call__(
        self, q: Array, k: Array, v: Array, *, mask: np.ndarray | None, scale: float | None
    ) -> tuple[Array, Array]:
        """Return o and lse."""


@explains_keywords
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Example(Memoized):
    """The operands of one call, with the exact results and the error bounds.

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
        The precision of the products of the implementation under test; see `cuflash.error_bound`.
    product_dtype : dtype, optional
        The dtype to which the implementation under test rounds P and dS; see `cuflash.error_bound`.
    origin : str
        The repr: Python source of this example, which can be run if the repr of the mask can.

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

    def but(self, **changes: Any) -> Example:
        """Copy the example with some operands replaced.

        Parameters
        ----------
        **changes : object
            New values by parameter name.

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
        """The mask as a bool array [*batch, num_heads, seqlen_q, seqlen_kv], 2-D for 2-D operands, or None.

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
        """The mask as a bool array, which is all True without a mask.

        Examples
        --------
        >>> import numpy as np
        >>> example = Example(q=np.zeros((1, 4)), k=np.ones((2, 4)), v=np.eye(2), mask=np.array([[True, False]]))
        >>> example.but(mask=None).allowed
        array([[ True,  True]])
        """
        shape = (*self.problem.lse_shape(), self.problem.seqlen_kv)
        return np.ones(shape, bool) if self.mask is None else self.dense_mask

    @functools.cached_property
    def weight_factors(self) -> Array:
        """The factors of the weights by dropout, [*batch, num_heads, seqlen_q, seqlen_kv], or None without dropout.

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
        return self.dropout.keep((*shape.batch, *shape[1:])) * self.dropout._draws.factor

    @functools.cached_property
    def exact(self) -> Bounds:
        """The exact o and lse of the oracle, and with `do` also dq, dk and dv, in a record like that of the bounds.

        Examples
        --------
        >>> import numpy as np
        >>> example = Example(q=np.zeros((1, 4)), k=np.ones((2, 4)), v=np.eye(2), mask=np.array([[True, False]]))
        >>> example.exact.o.astype(float)
        array([[1., 0.]])
        """
        with shifted_by(self.k.shape[-2] - self.q.shape[-2]):
            heads = oracle.Heads(
                self.q, self.k, self.v, self.dense_mask, self.scale, self.sink, self.score, self.weight_factors
            )
        o, lse = heads.attention()
        if self.do is None:
            return Bounds(o=o, lse=lse)
        dq, dk, dv, *others = heads.vjp(self.do, self.dlse, self.wrt)
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
        return self._bounds()

    @functools.cached_property
    def probable_bounds(self) -> Bounds:
        """The probable bounds of `cuflash.error_bound`, which assume that rounding errors partly cancel.

        Examples
        --------
        >>> import numpy as np
        >>> example = Example(q=np.zeros((1, 4)), k=np.ones((2, 4)), v=np.eye(2), mask=np.array([[True, False]]))
        >>> bool((example.probable_bounds.o <= example.bounds.o).all())
        True
        """
        return self._bounds(probable=True)

    def _bounds(self, **options: Any) -> Bounds:
        """Return `error_bound` of the operands, with further options."""
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
            **options,
        )

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={getattr(self, name).shape}" for name in "qkv")
        return self.origin or f"Example({shapes}, dtype={self.q.dtype}, mask={self.mask!r}, scale={self.scale})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the repr for Hypothesis, which would print every array otherwise."""
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
    """Assert that every element of the results is within its bound of the exact result.

    Parameters
    ----------
    example : Example
        The operands, with the exact results and the bounds.
    o, lse, dq, dk, dv, dsink : array, optional
        Results of the implementation under test; at least one, or `others`. Gradients need an example with `do`.
    others : dict of arrays by name, optional
        Gradients of the arrays of the score.
    probable : bool
        True to use the tighter `probable` bounds.

    Returns
    -------
    float
        The largest error divided by its bound.

    Raises
    ------
    AssertionError
        An element exceeds its bound, or a result has the wrong shape or a dtype that is narrower than the example's.
        The message names the worst and the first wrong element, and the example.
    TypeError
        There is no result, a result is not an array, such as the None of a function without a return statement, or the
        example lacks an operand that a result needs.

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
    share, exact = 1.0 if reference_is_finer(example.q.dtype) else 2.0, example.exact
    compared = [(name, result, getattr(exact, name), getattr(bounds, name)) for name, result in results.items()]
    compared += [(f"d{name}", x, exact.others[name], bounds.others[name]) for name, x in gradients.items()]
    return max(
        assert_within(name, as_result(name, actual, right.shape, example), right, share * bound, example)
        for name, actual, right, bound in compared
    )


def require_results(example: Example, results: Mapping[str, Array], others: Mapping[str, Array] | EllipsisType) -> None:
    """Raise an error if there are no results, or if the example has no exact result for one of them.

    Raises
    ------
    TypeError
        There is no result, or the example lacks an operand that a result needs.
    """
    if not isinstance(others, Mapping):
        raise TypeError(f"others must be a dict of the score's gradients by name; got {describe(others)}")
    if not results and not others:
        raise TypeError(f"results must be at least one of {', '.join(_RESULTS)}, others; got none")
    if unknown := [name for name in results if name not in _RESULTS]:
        raise TypeError(f"results must be among {', '.join(_RESULTS)}; got {', '.join(unknown)}")
    gradients = [name for name in results if name.startswith("d")] + [f"d{name}" for name in others]
    reasons = [f"{name} needs an example with do" for name in gradients if example.do is None]
    reasons += ["dsink needs an example with sink"] * ("dsink" in results and example.sink is None)
    reasons += [f"d{name} needs an example with {name} in wrt" for name in others if name not in example.wrt]
    if reasons:
        raise TypeError("; ".join(reasons))


def as_pair(results: Sequence[Array], example: Example) -> tuple[np.ndarray, np.ndarray]:
    """Return o and lse of a function under test as NumPy arrays with the example's shapes; see `as_results`."""
    __tracebackhide__ = True
    problem = example.problem
    o, lse = as_results(results, {"o": problem.o_shape(), "lse": problem.lse_shape()}, example)
    return o, lse


def as_results(results: Sequence[Array], shapes: Mapping[str, Sequence[int]], example: Example) -> list[np.ndarray]:
    """Convert the results of a function under test to NumPy arrays, after a check of their number, shapes and dtypes.

    Raises
    ------
    TypeError
        The results are not one array for each name.
    AssertionError
        An array has the wrong shape, or a dtype that is narrower than the example's.
    """
    __tracebackhide__ = True
    is_sequence = isinstance(results, (tuple, list))
    if is_sequence and len(results) == len(shapes) and all(hasattr(result, "shape") for result in results):
        return [as_result(name, result, shape, example) for (name, shape), result in zip(shapes.items(), results)]
    described = _describe_result(results)
    if is_sequence:
        described = f"{type(results).__name__} of {len(results)}: {', '.join(map(_describe_result, results[:4]))}"
    raise TypeError(f"the function under test must return ({', '.join(shapes)}); got {described}")


def _describe_result(result: Array) -> str:
    return f"one array of shape {tuple(result.shape)}" if hasattr(result, "shape") else describe(result)


def as_result(name: str, result: Array, shape: Sequence[int], example: Example) -> np.ndarray:
    """Convert one result to a NumPy array, after a check of its shape and of the width of its dtype."""
    __tracebackhide__ = True
    if result is None:
        raise TypeError(f"{name} must be an array; got None: the function under test must return it")
    try:
        array = np.asarray(result)
    except Exception as error:  # arrays of other libraries may raise any error
        message = str(error).partition("\n")[0]
        raise TypeError(f"{name} must be an array that NumPy reads; got {type(result).__name__}: {message}") from error
    assert array.shape == tuple(shape), f"{name} has shape {array.shape}, should have {tuple(shape)}\n{example}"
    least = np.dtype(example.q.dtype)
    least = accumulator_dtype(least) if name == "lse" else least
    is_wide = _is_float(array.dtype) and (name not in _ROUNDED or limits(array.dtype).eps <= limits(least).eps)
    assert is_wide, f"{name} has dtype {array.dtype}, should have {least} or a wider one\n{example}"
    return array


def _is_float(dtype: np.dtype) -> bool:
    """True if a dtype is a floating dtype of NumPy, or bfloat16."""
    return dtype.kind == "f" or dtype == BFLOAT16


def reference_is_finer(dtype: DTypeLike) -> bool:
    """True if the oracle is more precise than the results; False for float64 if long double is the same as float64."""
    return bool(np.finfo(np.longdouble).eps < limits(accumulator_dtype(np.dtype(dtype))).eps)


@explains_keywords
def assert_within(
    name: str, actual: np.ndarray, exact: np.ndarray, bound: np.ndarray | float, context: object = ""
) -> float:
    """Assert that every element of an array is within its bound of the exact element.

    Infinities must be equal, and NaN only matches NaN. With an infinite bound any element passes.

    Parameters
    ----------
    name : str
        The name of the array in the message.
    actual, exact : array
        The array and its exact value.
    bound : array
        The largest error of each element; broadcasts.
    context : object
        The end of the message.

    Returns
    -------
    float
        The largest error divided by its bound.

    Raises
    ------
    AssertionError
        An element exceeds its bound. The message names the worst and the first such element.

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
    """Return |actual - exact|, and this error divided by the bound."""
    wide = np.longdouble if np.longdouble in (actual.dtype, exact.dtype) else np.float64
    actual, exact = actual.astype(wide), exact.astype(wide)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        agrees = (actual == exact) | (np.isnan(actual) & np.isnan(exact))
        error = np.where(agrees, 0, np.abs(actual - exact))
        error = np.where(np.isnan(error), np.inf, error)
        ratio = np.where(agrees | np.isposinf(bound), 0, error / bound)
    return error, np.where(np.isnan(ratio), np.inf, ratio)


def _times(ratio: float) -> str:
    """Return the text of a ratio above 1 with two digits, or with as many digits as it takes to exceed 1."""
    texts = (f"{float(ratio):.{digits}g}" for digits in range(2, 18))
    return next((text for text in texts if float(text) > 1), "barely more than 1")


def _element(name: str, place: tuple[SupportsInt, ...]) -> str:
    return f"{name}[{', '.join(str(int(index)) for index in place)}]"


# Tier E


@explains_keywords
def assert_exact_probes(attend: Attend, example: Example) -> float:
    """Assert that an implementation is right for inputs whose results are known up to the last rounding.

    This runs all probes of this module with the shapes, dtype and mask of an example.

    Parameters
    ----------
    attend : callable
        The function under test, `(q, k, v, *, mask, scale) -> (o, lse)`.
    example : Example
        The example with the shapes, dtype and mask of the probes; some probes also use its values.

    Returns
    -------
    float
        The largest error divided by its bound.

    Raises
    ------
    AssertionError
        A probe fails. The message names the probe, the first wrong element and the example.

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


def assert_lse_counts_the_keys(attend: Attend, example: Example) -> float:
    """Assert that lse is log(number of keys) for q = 0, for which every weight is 1.

    The bound distinguishes n keys from n - 1 keys up to half a million keys in float32. The sum of weights is exact, so
    the error is at most four roundoffs: two for the logarithm, one for the change of base, one for its constant.
    """
    __tracebackhide__ = True
    lse = _with_zero_scores(attend, example, example.v)[1]
    exact = _logarithm(_key_counts(example))
    return assert_within("lse", lse, exact, 4 * _roundoffs(example)[1] * np.abs(exact), _probe("q = 0", example))


def assert_ones_stay_ones(attend: Attend, example: Example) -> float:
    """Assert that for q = 0 and v = 1, o is 1 up to one last place, and 0 in a row without keys."""
    __tracebackhide__ = True
    o = _with_zero_scores(attend, example, np.ones_like(example.v))[0]
    exact = np.broadcast_to(_key_counts(example)[..., None] > 0, o.shape).astype(np.float64)
    return assert_within("o", o, exact, 2 * _roundoffs(example)[0], _probe("q = 0, v = 1", example))


def assert_mask_is_the_one_asked_for(attend: Attend, example: Example) -> float:
    """Assert that each row attends the keys of the mask.

    With q = 0 and v[j] the unit vector of a digit of j, o counts the keys of a row by this digit. Two probes use the
    two digits of j in base value_dim, whose pair is different for every key up to value_dim ** 2. Each element of o is
    a quotient of two integers, rounded twice in the accumulator (a division may multiply by the reciprocal) and once to
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


def assert_means_are_exact(attend: Attend, example: Example) -> float:
    """Assert that for q = 0 and integers in v, o is the mean over a row's keys up to the rounding of the division."""
    __tracebackhide__ = True
    v = on_lattice(example.v)
    o = _with_zero_scores(attend, example, v)[0]
    group = example.problem.group_size
    values = np.repeat(v, group, axis=-3) if v.ndim > 2 else v
    exact = _mean(example, values)
    return assert_within("o", o, exact, _two_roundings(example, exact), _probe("q = 0, v = integers", example))


def assert_wide_accumulators(attend: Attend, dtype: DTypeLike) -> float:
    """Assert that accumulators are wider than the storage dtype, by one key of weight 1 and 8192 keys of tiny weights.

    The tiny weights are 2^-19 in float16 and 2^-15 in bfloat16, less than half a last place of 1. Since v = 1, the
    exact o is 1. An accumulator of the storage dtype loses all tiny weights and gives 0.98 or 0.8, and a denominator of
    the storage dtype gives 1.02 or 1.25. float32 and float64 always pass: they accumulate in their own dtype.
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
    """Round an array to integers from -2 to 2, which are exact in every dtype, as are their short sums and products."""
    return np.clip(np.rint(x.astype(np.float64)), -2, 2).astype(x.dtype)


def _with_zero_scores(attend: Attend, example: Example, v: Array) -> tuple[np.ndarray, np.ndarray]:
    q, k = np.zeros_like(example.q), on_lattice(example.k)
    return as_pair(attend(q, k, v, mask=example.dense_mask, scale=example.scale), example)


def _key_counts(example: Example) -> Array:
    return np.count_nonzero(example.allowed, axis=-1)


def _mean(example: Example, values: np.ndarray) -> Array:
    """Return the mean of integer values over the keys of each row, or 0 in a row without keys."""
    total = example.allowed.astype(np.float64) @ values.astype(np.float64)
    return total / np.maximum(_key_counts(example), 1)[..., None].astype(np.longdouble)


def _logarithm(count: np.ndarray) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(count.astype(np.longdouble))


def _two_roundings(example: Example, exact: np.ndarray) -> Array:
    u, ua = _roundoffs(example)
    return (u + 2 * ua) * (1 + u) * np.abs(exact) + float(limits(np.dtype(example.q.dtype)).smallest_subnormal)


def _roundoffs(example: Example) -> tuple[float, float]:
    """Return the unit roundoffs of the storage dtype and of the accumulator."""
    dtype = np.dtype(example.q.dtype)
    return float(limits(dtype).eps) / 2, float(limits(accumulator_dtype(dtype)).eps) / 2


def _probe(inputs: str, example: Example) -> str:
    return f"with {inputs} instead of the values of {example!r}"
