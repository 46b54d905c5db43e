"""Prediction of NaN and infinite results by the rule of docs/semantics.md, from bool arrays over queries and keys.

>>> import numpy as np
>>> example = Example(q=np.zeros((2, 1)), k=np.zeros((2, 1)), v=np.array([[1.0], [np.inf]]), mask=np.tri(2, dtype=bool))
>>> expected(example)["o"].is_not_finite.ravel().tolist()
[False, True]
>>> assert_non_finite(example, o=np.array([[1.0], [np.inf]]), lse=np.log([1.0, 2.0])) < 1
True
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..reference import expand_heads, sum_heads_to, sum_to, with_heads
from .assertions import Example, as_result, assert_within_bounds, require_results


class Expected(NamedTuple):
    """The classification of a result's elements, as bool arrays with the shape of the result.

    Attributes
    ----------
    is_nan : array
        Elements that must be NaN.
    is_not_finite : array
        Elements that must be NaN or infinite, including those of `is_nan`.
    may_be_not_finite : array
        Elements that may be NaN or infinite, because their sums may include 0 times NaN or infinity.
    """

    is_nan: Array
    is_not_finite: Array
    may_be_not_finite: Array


class _Holds(NamedTuple):
    """Bool arrays that are True where an operand holds NaN, and where it holds NaN or infinity."""

    nan: Array
    any: Array


def assert_non_finite(example: Example, **results: Array) -> float:
    """Assert that results are NaN and infinite exactly where they must be, and within their bounds elsewhere.

    Parameters
    ----------
    example : Example
        The operands, which contain NaN or infinities.
    **results : array
        Any of o, lse, dq, dk, dv and dsink that the implementation under test returned for the example.

    Returns
    -------
    float
        The largest error of a finite element divided by its bound.

    Raises
    ------
    AssertionError
        An element is wrong. The message names the result, the first wrong element and the example.
    TypeError
        There is no result, or a result is not an array.

    Examples
    --------
    >>> import numpy as np
    >>> example = Example(q=np.array([[np.nan]]), k=np.ones((2, 1)), v=np.ones((2, 1)))
    >>> assert_non_finite(example, o=np.array([[np.nan]]))
    0.0
    """
    __tracebackhide__ = True
    assert_not_finite_where_due(example, **results)
    finite, classes = finite_part(example), expected(example)
    compared: dict[str, Array] = {
        name: np.where(classes[name].may_be_not_finite, getattr(finite.exact, name), widest(result))
        for name, result in results.items()
    }
    return assert_within_bounds(finite, **compared)


def assert_not_finite_where_due(example: Example, **results: Array) -> None:
    """Assert that results are NaN and infinite where they must be; the arguments are those of `assert_non_finite`."""
    __tracebackhide__ = True
    require_results(example, results, {})
    classes = expected(example)
    for name, result in results.items():
        must = classes[name]
        wide = widest(as_result(name, result, must.is_nan.shape, example))
        _assert_all(name, wide, must.is_nan, np.isnan(wide), "NaN", example)
        _assert_all(name, wide, must.is_not_finite, ~np.isfinite(wide), "NaN or infinite", example)


def _assert_all(name: str, result: Array, must: Array, does: Array, words: str, example: Example) -> None:
    __tracebackhide__ = True
    wrong = np.argwhere(must & ~does)
    if len(wrong):
        position = tuple(int(index) for index in wrong[0])
        raise AssertionError(
            f"{name}[{', '.join(map(str, position))}] is {float(result[position])!r}, should be {words}; "
            f"{len(wrong)} of {int(must.sum())} elements that should be {words} are not\n{example}"
        )


def expected(example: Example) -> dict[str, Expected]:
    """Classify the elements of o and lse, with `do` also of dq, dk and dv, and with a sink also of dsink."""
    score, allowed, holds = _pairs(example)
    is_hidden = allowed & np.isneginf(score)  # the weight of a score of -inf is 0
    is_nan_row = (allowed & (np.isnan(score) | np.isposinf(score))).any(axis=-1)
    counts = allowed & ~is_hidden
    has_scores = counts.any(axis=-1)

    v = holds["v"]
    o = Expected(
        is_nan_row[..., None] | _meets(counts, v.nan),
        is_nan_row[..., None] | _meets(counts, v.any),
        is_nan_row[..., None] | v.any.any(axis=-2, keepdims=True),
    )
    results = {"o": o, "lse": Expected(is_nan_row, is_nan_row, is_nan_row)}
    if example.do is not None:
        results |= _gradients(example, score, allowed & has_scores[..., None], allowed, is_nan_row, o, holds)
    if example.problem.has_heads:
        return results
    return {
        name: Expected(*(x[0] if name in ("o", "lse") else x for x in classes)) for name, classes in results.items()
    }


def finite_part(example: Example) -> Example:
    """Return the example with 0 instead of NaN and infinities, and without the keys whose scores are -inf.

    Elements of results that no NaN or infinity reaches are equal for both examples.
    """
    score, allowed, _ = _pairs(example)
    mask = allowed & ~np.isneginf(score)
    operands = {name: getattr(example, name) for name in ("q", "k", "v", "do", "dlse")}
    zeroed = {name: np.where(np.isfinite(x), x, 0).astype(x.dtype) for name, x in operands.items() if x is not None}
    return example.but(**zeroed, mask=mask if example.problem.has_heads else mask[0])


def _gradients(
    example: Example, score: Array, counts: Array, allowed: Array, is_nan_row: Array, o: Expected,
    holds: dict[str, _Holds],
) -> dict[str, Expected]:
    """Classify dq, dk, dv and dsink; `counts` selects the allowed pairs in rows with a score above -inf, or NaN."""
    q, k, v, do, dlse = (holds[name] for name in ("q", "k", "v", "do", "dlse"))
    has_scores = counts.any(axis=-1)
    # The delta of a row is a term of every dS of the row.
    nan_delta = is_nan_row | dlse.nan | do.nan.any(axis=-1) | o.is_nan.any(axis=-1)
    bad_delta = is_nan_row | dlse.any | do.any.any(axis=-1) | o.is_not_finite.any(axis=-1)
    any_delta = is_nan_row | (dlse.any & has_scores) | do.any.any(axis=-1) | o.may_be_not_finite.any(axis=-1)
    # dP = do . v is the other term of dS.
    nan_ds = counts & (nan_delta[..., None] | v.nan.any(axis=-1)[..., None, :])
    bad_ds = counts & (bad_delta[..., None] | v.any.any(axis=-1)[..., None, :])
    any_ds = allowed & (any_delta[..., None] | v.any.any(axis=-1)[..., None, :])

    dq = (
        nan_ds.any(axis=-1)[..., None] | _meets(counts, k.nan),
        bad_ds.any(axis=-1)[..., None] | _meets(counts, k.any),
        any_ds.any(axis=-1)[..., None] | k.any.any(axis=-2, keepdims=True),
    )
    # Infinities in a key are multiplied with the zeros that pad a tile of queries: 0 times infinity is NaN.
    fills = k.any.any(axis=-1)[..., None]
    dk = (
        np.broadcast_to(nan_ds.any(axis=-2)[..., None], k.any.shape),
        np.broadcast_to(bad_ds.any(axis=-2)[..., None], k.any.shape),
        any_ds.any(axis=-2)[..., None] | q.any.any(axis=-2, keepdims=True) | fills,
    )
    in_nan_row = (counts & is_nan_row[..., None]).any(axis=-2)[..., None]
    dv = (
        in_nan_row | _meets(counts.swapaxes(-1, -2), do.nan),
        in_nan_row | _meets(counts.swapaxes(-1, -2), do.any),
        in_nan_row | do.any.any(axis=-2, keepdims=True) | fills,
    )
    shapes = example.q.shape, example.k.shape, example.v.shape
    of_sink = {}
    if example.sink is not None:  # in a row without a key lse is the sink, so that dlse affects dsink and do does not
        weighs = is_nan_row | has_scores & _weighs_beside_sink(example, score, counts)
        rows = (
            weighs & nan_delta | dlse.nan,
            weighs & bad_delta | dlse.any,
            allowed.any(axis=-1) & any_delta | dlse.any,
        )
        of_sink["dsink"] = Expected(*(_of_sink(x.any(axis=-1), example.sink.shape) for x in rows))
    return of_sink | {
        "dq": Expected(*(sum_to(x.astype(float), shapes[0]) > 0 for x in dq)),
        "dk": Expected(*(sum_heads_to(x.astype(float), shapes[1]) > 0 for x in dk)),
        "dv": Expected(*(sum_heads_to(x.astype(float), shapes[2]) > 0 for x in dv)),
    }


def _weighs_beside_sink(example: Example, score: Array, counts: Array) -> Array:
    """Return which rows have keys whose weight is more than 1/400 of the sink's.

    With less weight, a row may behave like a row without a key, because o rounds to 0 and lse to the sink.
    """
    with np.errstate(invalid="ignore"):
        of_keys = np.logaddexp.reduce(np.where(counts, score, -np.inf), axis=-1)
        return ~(of_keys < np.asarray(example.sink).astype(np.float64)[..., None] - 6)


def _of_sink(x: Array, shape: tuple[int, ...]) -> Array:
    """Reduce a bool array over heads to the shape of a sink: an element is True if any head that shares it is True."""
    return (sum_to(x.astype(float), shape or (1,)) > 0).reshape(shape)


def _pairs(example: Example) -> tuple[Array, Array, dict[str, _Holds]]:
    """Return scores and mask [*batch, num_heads, seqlen_q, seqlen_kv], and where operands hold NaN and infinities."""
    problem = example.problem
    wide = {name: with_heads(_operand(example, name)) for name in ("q", "k", "v")}
    wide["k"], wide["v"] = (expand_heads(wide[name], problem.num_heads) for name in ("k", "v"))
    full = {name: np.broadcast_to(x, (*problem.batch, *x.shape[-3:])) for name, x in wide.items()}
    if example.do is not None:
        full["do"] = with_heads(_operand(example, "do"))
        lse_shape = full["do"].shape[:-1]
        full["dlse"] = np.zeros(lse_shape) if example.dlse is None else _operand(example, "dlse").reshape(lse_shape)
    with np.errstate(invalid="ignore"):
        score = problem.softmax_scale * (full["q"] @ full["k"].swapaxes(-1, -2))
    allowed = example.allowed if problem.has_heads else example.allowed[None]
    return score, allowed, {name: _Holds(np.isnan(x), ~np.isfinite(x)) for name, x in full.items()}


def _operand(example: Example, name: str) -> Array:
    """Return an operand in float64; with precision "tf32x3" an infinity counts as NaN."""
    x = np.asarray(getattr(example, name)).astype(np.float64)
    return np.where(np.isinf(x), np.nan, x) if example.precision == "tf32x3" and name != "dlse" else x


def _meets(pairs: Array, holds: Array) -> Array:
    """Return for each row and column whether `holds` is true in this column for any key that pairs with the row."""
    return pairs.astype(np.float32) @ holds.astype(np.float32) > 0


def widest(x: Array) -> Array:
    """Convert an array to long double."""
    return np.asarray(x).astype(np.longdouble)
