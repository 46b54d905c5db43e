"""Merging of attention over disjoint keys: pairs (o, lse) form a monoid with the identity (0, -inf)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import DTYPES, Array, accumulator_dtype, describe, is_array, namespace
from .errors import UnsupportedProblem, refuse
from .executors import gpu
from .executors._layout_key import layout_key
from .executors._results import BoundMerge
from .keywords import explains_keywords
from .layouts import layout_reasons
from .planning._call_cache import CALLS
from .planning._result_kernels import MOST_PARTS
from .plans.conversion import as_arrays
from .plans.fit import device_reasons


@explains_keywords
def merge(outs: Sequence[Array] | Array, lses: Sequence[Array] | Array) -> tuple[Array, Array]:
    """Combine attention over disjoint sets of keys into attention over their union.

    Parameters
    ----------
    outs : sequence of arrays [..., seqlen_q, value_dim]
        The outputs of the parts, with equal shapes and dtypes, or one array with the parts along its first axis. (If
        you pass the o of a single call, its batch entries or heads are merged.) Arrays of other libraries are accepted
        as in `attention`, but arrays with NumPy dtypes, such as JAX arrays, are not converted.
    lses : sequence of arrays [..., seqlen_q]
        The log-sum-exps of the parts, as natural logarithms.

    Returns
    -------
    o : array [..., seqlen_q, value_dim]
        The merged outputs, in the dtype of the parts. Rows that are empty in every part give 0.
    lse : array [..., seqlen_q]
        The merged log-sum-exps, in the dtype of the parts. Rows that are empty in every part give -inf.

    Raises
    ------
    TypeError
        A part is not an array, or an argument cannot be divided into parts.
    UnsupportedProblem
        There are no parts, or their shapes or dtypes do not match. The error lists every reason.

    Notes
    -----
    o = sum_p exp(lse_p - lse) o_p with lse = log sum_p exp(lse_p): the rescaling of FlashAttention-2
    (arXiv 2307.08691, section 3.1), applied to finished parts. Sums are in float32, or in float64 for float64 parts.

    A sink counts only once: pass it to the call that computes one of the parts. A sink is itself a part with o = 0 and
    lse = sink, so that ``attention(..., sink=sink)`` equals ``merge([o, 0 * o], [lse, sink])``.

    o and lse of a row are NaN if the row's lse in some part is NaN or +inf, because one of its scores is. A part with
    lse = -inf adds nothing to the row, even if its o is NaN. NaN and infinity in o of any other part appear in the
    merged o, however small the weight of the part.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 8, 4))
    >>> left = cuflash.attention(q, k[:3], v[:3], return_lse=True)
    >>> right = cuflash.attention(q, k[3:], v[3:], return_lse=True)
    >>> o, lse = cuflash.merge(*zip(left, right))
    >>> bool(np.allclose(o, cuflash.attention(q, k, v)))
    True
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    key = _key(outs, lses)
    bound_merge: BoundMerge | None = CALLS.get(key)
    merged = None if bound_merge is None else bound_merge(outs, lses)
    if merged is not None:
        return merged
    _check(outs, lses)
    if key is not None and len(outs) > MOST_PARTS:
        return _merged_in_stages(outs, lses)
    if key is not None:
        bound_merge = BoundMerge(outs, lses, gpu.current_target())
        CALLS.put(key, bound_merge)
        o_and_lse = bound_merge(outs, lses)
        assert o_and_lse is not None  # `_check` has refused misaligned addresses
        return o_and_lse
    with np.errstate(all="ignore"):  # weights may underflow to 0, and results may be NaN
        return _merged(outs, lses)


def _key(outs: list[Array], lses: list[Array]) -> Hashable:
    """Return the cache key of a merge of CuPy arrays, or None for other arrays and unsupported combinations."""
    if not outs or isinstance(outs[0], np.ndarray):
        return None
    layout = layout_key(*outs, *lses)
    return None if layout is None else ("merge", len(outs), layout)


def _merged_in_stages(outs: list[Array], lses: list[Array]) -> tuple[Array, Array]:
    """Merge more parts than one launch supports: first groups of parts, in the accumulator dtype, then the results."""
    wide = [out.astype(lses[0].dtype, copy=False) for out in outs]
    starts = range(0, len(outs), MOST_PARTS)
    runs = [merge(wide[start : start + MOST_PARTS], lses[start : start + MOST_PARTS]) for start in starts]
    o, lse = merge(*(list(each) for each in zip(*runs)))
    return o.astype(outs[0].dtype, copy=False), lse


@explains_keywords
def merge_vjp(
    outs: Sequence[Array] | Array, lses: Sequence[Array] | Array
) -> tuple[tuple[Array, Array], MergePullback]:
    """Merge attention over disjoint sets of keys, and return its vector-Jacobian product.

    Parameters
    ----------
    outs, lses : sequences of arrays
        The parts, as in `merge`.

    Returns
    -------
    merged : (array, array)
        The result and its log-sum-exp, as `merge` returns them.
    vjp : MergePullback
        ``vjp(do, dlse=None)`` returns ``(douts, dlses)``, two tuples with one array for each part: the gradients of
        sum(do * o) + sum(dlse * lse), in the shapes and dtypes of `outs` and `lses`. The gradients are 0 in rows that
        are empty in the part.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `merge`.

    Notes
    -----
    With w_p = exp(lse_p - lse), do_p = w_p do and dlse_p = w_p (do . (o_p - o) + dlse). Pass both to the vjp of the
    part: ``vjp_p(do_p, dlse_p)``.

    To multiply a part's weights by a gate g_p, o = sum_p g_p exp(lse_p) o_p / sum_p g_p exp(lse_p), pass
    ``lse_p + log(g_p)`` instead of lse_p. The gradient of log(g_p) is dlse_p.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 8, 4))
    >>> left, left_vjp = cuflash.attention_vjp(q, k[:3], v[:3], return_lse=True)
    >>> right, right_vjp = cuflash.attention_vjp(q, k[3:], v[3:], return_lse=True)
    >>> (o, lse), vjp = cuflash.merge_vjp(*zip(left, right))
    >>> (do_left, do_right), (dlse_left, dlse_right) = vjp(do)
    >>> dq = left_vjp(do_left, dlse_left).dq + right_vjp(do_right, dlse_right).dq
    >>> _, whole_vjp = cuflash.attention_vjp(q, k, v)
    >>> bool(np.allclose(dq, whole_vjp(do).dq))
    True
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    o, lse = merge(outs, lses)
    return (o, lse), MergePullback(tuple(outs), tuple(lses), lse)


@dataclass(frozen=True, eq=False, repr=False)
class MergePullback:
    """The vector-Jacobian product of `merge`, which `merge_vjp` returns.

    Attributes
    ----------
    outs, lses : tuple of arrays
        The parts.
    lse : array
        The merged log-sum-exp.
    """

    outs: tuple[Array, ...]
    lses: tuple[Array, ...]
    lse: Array

    @explains_keywords
    def __call__(self, do: Array, dlse: Array | None = None) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Return the gradients of sum(do * o) + sum(dlse * lse) with respect to the parts: (douts, dlses).

        Raises
        ------
        TypeError
            An argument is not an array.
        UnsupportedProblem
            do differs from o, or dlse from lse, in shape or dtype. The error lists every reason.
        """
        reasons: list[str] = []
        do = self._like("do", do, "o", self.outs[0], reasons)
        dlse = None if dlse is None else self._like("dlse", dlse, "lse", self.lse, reasons)
        refuse(reasons)
        xp = namespace(self.lse)
        with np.errstate(all="ignore"):  # weights may underflow to 0, and results may be NaN
            wide = do.astype(accumulator_dtype(do.dtype))
            is_empty = [xp.isneginf(lse) for lse in self.lses]
            weights = [xp.exp(lse - self.lse) for lse in self.lses]
            slopes = [
                xp.where(no_key, 0, (wide * out.astype(wide.dtype)).sum(axis=-1))
                for no_key, out in zip(is_empty, self.outs)
            ]
            # do . o, with the o that has not been rounded to the dtype of the parts
            mean = sum(weight * slope for weight, slope in zip(weights, slopes))
            by_lse = -mean if dlse is None else dlse - mean
            douts = tuple(
                xp.where(no_key[..., None], 0, weight[..., None] * wide).astype(do.dtype)
                for no_key, weight in zip(is_empty, weights)
            )
            dlses = tuple(
                xp.where(no_key, 0, weight * (slope + by_lse)).astype(self.lse.dtype)
                for no_key, weight, slope in zip(is_empty, weights, slopes)
            )
        return douts, dlses

    def _like(self, name: str, value: Any, like: str, wanted: Array, reasons: list[str]) -> Any:
        """Return a cotangent as an array; append to `reasons` if shape, dtype or library differ from the result's."""
        array = _as_known_array(name, value)
        if not is_array(array):
            raise TypeError(f"{name} must be an array; got {describe(value)}")
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            reasons.append(
                f"{name} must have {like}'s shape {wanted.shape} and dtype {wanted.dtype}; got {array.shape}, "
                f"{array.dtype}"
            )
        elif namespace(array) is not namespace(wanted):
            reasons.append(f"{name} must be an array of the parts' library; got {describe(array)}: copy it")
        return array


def _merged(outs: list[Array], lses: list[Array]) -> tuple[Array, Array]:
    xp = namespace(outs[0])
    accumulator = accumulator_dtype(outs[0].dtype)
    lse_max = lses[0]
    for lse in lses[1:]:
        lse_max = xp.maximum(lse_max, lse)  # NaN if either operand is NaN
    # lse_max is -inf in empty rows. It is replaced by 0, because -inf - (-inf) would be NaN.
    shift = xp.where(xp.isneginf(lse_max), 0, lse_max)
    total = xp.zeros_like(lse_max)
    o = xp.zeros(outs[0].shape, dtype=accumulator)
    for out, lse in zip(outs, lses):
        weight = xp.exp(lse - shift)
        total = total + weight
        # A part that is empty in a row adds nothing to it, even if its o is NaN.
        o = o + xp.where(xp.isneginf(lse)[..., None], 0, weight[..., None] * out.astype(accumulator))
    is_empty = total == 0
    safe = xp.where(is_empty, 1, total)
    merged = xp.where(is_empty, -xp.inf, shift + xp.log(safe)).astype(lse_max.dtype)
    return (o / safe[..., None]).astype(outs[0].dtype), merged


def _parts(name: str, value: Sequence[Array] | Array) -> list[Array]:
    """Return the parts as a list, with arrays converted to known kinds; `_check` refuses other values."""
    try:
        parts = list(value if isinstance(value, (list, tuple)) else _as_known_array(name, value))
    except (TypeError, NotImplementedError) as error:
        message = f"{name} must be a sequence of arrays, or one array of all parts; got {describe(value)}"
        raise TypeError(message) from error
    return [_as_known_array(f"{name}[{number}]", part) for number, part in enumerate(parts)]


def _as_known_array(name: str, value: Any) -> Any:
    """Return an array itself if its namespace has NumPy's functions and dtypes, else as a NumPy or CuPy array."""
    if is_array(value) and isinstance(value.dtype, np.dtype):
        return value
    return as_arrays({name: value}, {name: np.float64})[name]


def _check(outs: list[Array], lses: list[Array]) -> None:
    for name, parts in (("outs", outs), ("lses", lses)):
        for number, part in enumerate(parts):
            if not is_array(part):
                raise TypeError(f"{name}[{number}] must be an array; got {describe(part)}")
    if not outs or len(outs) != len(lses):
        raise UnsupportedProblem(
            f"outs and lses must have the same number of parts, at least one; got {len(outs)} and {len(lses)}"
        )
    reasons = []
    spaces = {namespace(part).__name__ for part in (*outs, *lses)}
    if len(spaces) > 1:
        libraries = " and ".join(sorted(spaces))
        reasons.append(f"outs and lses must be arrays of the same library; got {libraries}: copy them")
    if outs[0].ndim == 0:
        reasons.append("outs must have shape (..., seqlen_q, value_dim); got parts of shape ()")
    if outs[0].dtype not in DTYPES:
        reasons.append(f"outs must have a floating dtype that attention returns; got {outs[0].dtype}")
    if len(outs) == 2 and outs[0].ndim and outs[1].shape == outs[0].shape[:-1] == lses[1].shape:
        reasons.append("outs must be the o of all parts; got one pair (o, lse): write merge(*zip(left, right))")
    for number, (out, lse) in enumerate(zip(outs, lses)):
        if out.shape != outs[0].shape or out.dtype != outs[0].dtype:
            reasons.append(
                f"outs[{number}] must have outs[0]'s shape {outs[0].shape} and dtype {outs[0].dtype}; "
                f"got {out.shape}, {out.dtype}"
            )
        if lse.shape != out.shape[:-1] or lse.dtype != accumulator_dtype(outs[0].dtype):
            reasons.append(
                f"lses[{number}] must have shape {out.shape[:-1]} and dtype {accumulator_dtype(outs[0].dtype)}; "
                f"got {lse.shape}, {lse.dtype}"
            )
        for name, part in ((f"outs[{number}]", out), (f"lses[{number}]", lse)):
            if namespace(part).__name__ == "cupy":
                reasons += layout_reasons(name, part) + device_reasons(name, part)
    refuse(reasons)
