"""How far a correct result may be from the exact one: element-wise bounds computed from the inputs.

Every bound is the first-order error analysis of one flash-attention pass, evaluated on the caller's own numbers, so it
is small where the data are tame and large where they are not. Nothing in it was fitted. The notation of the derivation:

    T, A        storage dtype; accumulator dtype (float32, or float64 for float64)
    u, ua, up   unit roundoffs of T, of A, and of the dtype P and dS are rounded to before the second products
    t           what rounding its operands costs a product, relatively: 0 but at precision tf32 and tf32x3
    w, wa, wp   what underflow may cost an element of those three
    k(n)        roundoffs that a sum of n terms may collect
    S, m, L     scores, their row maximum, log-sum-exp; P = exp(S - L); all exact, in natural units
    |X|         element-wise

The scores. q is multiplied by scale log2(e), a rounded constant (three roundings at most), the product with k sums
head_dim terms, and a kernel that scales after the product rounds no more often::

    |error of S| <= ((k(d) + 4) ua + t) |scale| |Q||K|^T

The weights p = exp2(S log2(e) - m'). Subtracting the running maximum rounds once; a later rescaling of the row rounds
its own argument, and those arguments add up to at most |S| + |m|; a fused multiply-add with the rounded m log2(e)
costs two. Four cover all. exp2 is off by at most 4 ua (ex2.approx.ftz.f32 by 2^-22; NumPy's is nearer)::

    eta = ((k(d) + 4) ua + t) |scale| |Q||K|^T + 4 ua (|S| + |m|) + 4 ua    so that  |log p^ - log p| <= eta

Its effect is carried without linearising, which keeps the bound valid when eta is large: |p^ - p| <= p (exp(eta) - 1),
and with r = sum_j P_j (exp(eta_j) - 1) the computed row sum lies between l / (1 + r) and l (1 + r).

Sums over keys. k(n) = n holds for any order of summation. It also covers an online softmax with tiles of b >= 6 keys,
whose n / b tiles each add once and rescale once (a product and an exp2, five roundoffs): b + 6 n / b <= n + 8.

    tol_L = log(1 + r) + (k(n) + 8) ua + 4 ua (|m| + |L|)        four: log, the change of base twice, the last addition
    tol_O = (1 + r) (sum_j P (exp(eta) - 1) |v| + r |O| + (up + t + 2 (k(n) + 8) ua) sum_j P exp(eta) |v|
                     + sum_j min(P, wp / l) |v|) + u |O| + w

O is a weighted mean of the rows of v whatever the weights, so tol_O is never more than the spread of v plus the same
roundings of the largest |v|.

The gradients. P is computed again from the stored lse, so its error is eta' = eta + tol_L + 4 ua (|S| + |L|), and
D = rowsum(dO O) uses the O that was stored, error and all::

    e_dP = ((k(dv) + 2) ua + t) |dO||V|^T      e_D = sum_c |dO| tol_O + (k(dv) + 2) ua sum_c |dO| (|O| + tol_O)
    G    = dP - D + dlse                       e_G = e_dP + e_D + 2 ua (|dP| + |D| + |dlse|)
    e_dS = P (exp(eta') - 1) (|G| + e_G) + P e_G + 2 ua P exp(eta') (|G| + e_G)
    t_dS = e_dS + up (|dS| + e_dS) + min(|dS| + e_dS, wp)      inf where the dtype of up may overflow
    tol_dQ = |scale| sum_j (t_dS + ((k(n) + 8) ua + t) (|dS| + e_dS)) |k| + u |dQ| + w
    tol_dK likewise over i, with |q|
    tol_dV = sum_i (P (exp(eta') - 1) + min(P, wp) + (up + t + (k(nq) + 2) ua) P exp(eta')) |dO| + u |dV| + w

The 8 leaves room for products taken with the scaled q or k and scaled back. Sums over a group of heads and over
broadcast axes count as one sum. Products that underflow in A cost wa each. Last, all is multiplied by 1.5, for the
products of small terms left out and for the freedom of compilers to contract and to reorder.

On tensor cores. tf32 has 11 significant bits: two operands rounded to it cost a product t = 2 2^-11 + 2^-22. tf32x3
splits an operand into x = hi + lo + rest, hi being x rounded to tf32 and lo what 11 bits hold of x - hi. For x between
2^e and 2^(e + 1), x - hi is a multiple of 2^(e - 23) and at most 2^(e - 11), so |rest| <= 2^-23 |x|. Left out are lo lo
and both rests: t = 2^-22 + 2 2^-23 = 8 ua. Sums in tensor cores are rounded towards zero, at most 2 ua every eight
terms, three times over for tf32x3: the ua that k(n) has for every term covers it.

After N. J. Higham, Accuracy and Stability of Numerical Algorithms, chapter 3, and Blanchard, Higham and Higham,
Accurately computing the log-sum-exp and softmax functions (IMA J. Numer. Anal. 41, 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .arrays import DTYPES, Array, accumulator_dtype, as_dtype, describe, flag_reasons, is_array, no_array
from .blocks.work_list import requested_mask
from .errors import UnsupportedProblem, collecting
from .memory import kind_of
from .planning.problem import Problem
from .plans import as_arrays, as_mask_of_arrays
from .reference import allowed_of, expand_heads, sum_heads_to, sum_to, with_heads

__all__ = ["Bounds", "error_bound"]

SECOND_ORDER = 1.5
_OF_OPERANDS = {"ieee": 0.0, "tf32": 2 * 2.0**-11 + 2.0**-22, "tf32x3": 8 * 2.0**-24}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bounds:
    """How far each element of a result may be from the exact one; float64 arrays.

    >>> import numpy as np
    >>> q = k = v = np.ones((4, 8), np.float32)
    >>> bounds = error_bound(q, k, v)
    >>> bounds.o.shape, bounds.lse.shape, bounds.dq
    ((4, 8), (4,), None)

    Attributes
    ----------
    o, lse : array
        Shaped as `attention` returns them.
    dq, dk, dv : array or None
        Shaped as q, k, v; None where no `do` was given.
    """

    o: Array
    lse: Array
    dq: Array = None
    dk: Array = None
    dv: Array = None


def error_bound(
    q: Array,
    k: Array,
    v: Array,
    do: Array | None = None,
    *,
    dlse: Array | None = None,
    mask: Any = None,
    causal: bool | str = False,
    window: Any = None,
    scale: float | None = None,
    precision: str = "ieee",
    product_dtype: Any = None,
    probable: bool = False,
) -> Bounds:
    """Element-wise bounds on the error of attention and its gradients, against exact arithmetic on the same inputs.

    >>> import numpy as np
    >>> from cuflash import reference
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 4, 100, 32))
    >>> exact, _ = reference.attention(q, k, v)
    >>> rounded = exact.astype(np.float16)
    >>> bound = error_bound(q.astype(np.float16), k.astype(np.float16), v.astype(np.float16)).o
    >>> bound.shape, bool(bound.max() < 2e-3)
    ((4, 100, 32), True)

    Parameters
    ----------
    q, k, v, mask, causal, window, scale, precision
        As in `attention`; what the inputs hold is taken as exact.
    do : array, optional
        The gradient of o; with it the gradients are bounded too.
    dlse : array, optional
        The gradient of lse; zero unless given.
    product_dtype : dtype, optional
        What P and dS are rounded to before they multiply v, do, k and q: the accumulator's dtype unless given, as in
        the `cpu` executor; tensor cores want float16 or bfloat16.
    probable : bool
        Let a sum of n terms err by min(n, 6 sqrt(n)) roundoffs instead of n. That is no guarantee any more (rounding
        errors that all point one way can exceed it), but at thousands of keys it sees far smaller faults; Higham and
        Mary, A new approach to probabilistic rounding error analysis (SIAM J. Sci. Comput. 41, 2019).

    Returns
    -------
    Bounds
        |result - exact| <= bound, element by element. Rows with no key have bound 0: o is 0 and lse is -inf, exactly.
        Infinite where nothing is promised: a result that its dtype may overflow, gradients from a dS that the dtype it
        is rounded to may overflow (65504 in float16), or scores so large (around 10^6 in float32) that exp(score) has
        no correct digit.

    Raises
    ------
    TypeError, UnsupportedProblem
        As `attention` does.

    Notes
    -----
    Takes some ten float64 arrays of [*batch, num_heads, seqlen_q, seqlen_kv] and the time of a few `reference` calls.
    For float64 inputs "exact" needs more than float64: give `reference` long doubles. The derivation
    heads this module's source.
    """
    q, k, v, do, dlse = _host_arrays({"q": q, "k": k, "v": v, "do": do, "dlse": dlse})
    reasons = flag_reasons("probable", probable)
    problem = None
    with collecting(reasons):
        problem = Problem.of(q, k, v, scale=scale, precision=precision)
    with collecting(reasons):
        product_dtype = None if product_dtype is None else _product_dtype(product_dtype)
    if problem is not None:
        reasons += _cotangent_reasons("do", do, problem.o_shape())
        reasons += _cotangent_reasons("dlse", dlse, problem.lse_shape())
        with collecting(reasons):
            asked = requested_mask(as_mask_of_arrays(mask, "cpu"), causal, window, problem.mask_shape, np)
    if reasons or problem is None:
        raise UnsupportedProblem(reasons)
    allowed = asked.toarray(**problem.mask_shape._asdict())
    model = _Rounding.of(problem.dtype, precision, product_dtype, probable)
    return _dense_bounds(q, k, v, do, dlse, allowed, problem.softmax_scale, model)


def _host_arrays(given: dict[str, Any]) -> list[Array]:
    """The arguments as NumPy's arrays; None where do and dlse are not given."""
    arrays = as_arrays(given)
    for name, array in arrays.items():
        if not is_array(array) and not (array is None and name in ("do", "dlse")):
            raise TypeError(no_array(name, array))
    reasons = [
        f"{name} must be a NumPy array; got {kind_of(array)}: copy it with its get()"
        for name, array in arrays.items()
        if array is not None and not isinstance(array, np.ndarray)
    ]
    if reasons:
        raise UnsupportedProblem(reasons)
    return list(arrays.values())


def _cotangent_reasons(name: str, array: Array | None, shape: tuple[int, ...]) -> list[str]:
    if array is None or array.shape == shape and (array.dtype in DTYPES or array.dtype.kind in "iuf"):
        return []
    return [f"{name} must have shape {shape} and hold real numbers; got {describe(array)}"]


def _product_dtype(given: Any) -> np.dtype[Any]:
    dtype = as_dtype("product_dtype", given)
    try:
        limits(dtype)
    except ValueError as error:
        told = f"product_dtype must be a dtype of floats; got {dtype}: np.float16 is one"
        raise UnsupportedProblem([told]) from error
    return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rounding:
    """The module docstring's u, ua, up, t, w, wa, wp and k."""

    u: float
    ua: float
    up: float
    t: float
    w: float
    wa: float
    wp: float
    largest: float
    largest_product: float
    probable: bool

    @classmethod
    def of(cls, storage: np.dtype[Any], precision: str, product: Any, probable: bool) -> _Rounding:
        accumulator = accumulator_dtype(storage)
        product = accumulator if product is None else np.dtype(product)
        return cls(
            u=_roundoff(storage),
            ua=_roundoff(accumulator),
            up=_roundoff(product),
            t=_OF_OPERANDS[precision],
            w=_underflow(storage),
            wa=_underflow(accumulator),
            wp=_underflow(product),
            largest=float(limits(storage).max),
            largest_product=float(limits(product).max),
            probable=probable,
        )

    def k(self, terms: int) -> float:
        return min(terms, 6 * math.sqrt(terms)) if self.probable else terms


def limits(dtype: np.dtype[Any]) -> Any:
    """`numpy.finfo` that knows bfloat16 too."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def _roundoff(dtype: np.dtype[Any]) -> float:
    return float(limits(dtype).eps) / 2


def _underflow(dtype: np.dtype[Any]) -> float:
    """Half the smallest subnormal of float16; elsewhere the smallest normal, as CUDA compilers may flush below it."""
    info = limits(dtype)
    return float(info.smallest_subnormal) / 2 if dtype == np.float16 else float(info.smallest_normal)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Forward:
    """The exact forward pass and its unscaled tolerances, as far as the backward needs them."""

    score: Array  # 0 where masked
    p: Array
    log_p: Array  # -inf where masked
    eta: Array
    lse: Array  # [..., rows, 1], 0 in empty rows
    o: Array
    tol_lse: Array  # [..., rows, 1]
    tol_o: Array


# Overflow to inf, and inf * 0, are answers here: "nothing is promised".
@np.errstate(over="ignore", invalid="ignore", under="ignore")
def _dense_bounds(
    q: Array,
    k: Array,
    v: Array,
    do: Array | None,
    dlse: Array | None,
    mask: Array | None,
    scale: float,
    model: _Rounding,
) -> Bounds:
    """`error_bound` with the mask as a bool array, or None, and the scale as a number."""
    batch = np.broadcast_shapes(*(np.shape(x)[:-3] for x in (q, k, v)))
    queries = with_heads(np.asarray(q).astype(np.float64))
    num_heads = queries.shape[-3]
    allowed = allowed_of(mask, (*batch, num_heads, np.shape(q)[-2], np.shape(k)[-2]))
    # What no one attends, and rows that attend nothing, take no part whatever they hold.
    is_seen = allowed.any(axis=-2)[..., None]
    is_row = allowed.any(axis=-1)[..., None]
    queries = np.where(is_row, queries, 0)
    keys, values = (np.where(is_seen, expand_heads(np.asarray(x).astype(np.float64), num_heads), 0) for x in (k, v))

    forward = _forward_tolerances(queries, keys, values, allowed, scale, model)
    tol_o = _finished(forward.tol_o, forward.o, model)
    tol_lse = _nan_to_inf(SECOND_ORDER * forward.tol_lse[..., 0])
    headed = np.ndim(q) > 2
    o_bound, lse_bound = (tol_o, tol_lse) if headed else (tol_o[0], tol_lse[0])
    if do is None:
        return Bounds(o=o_bound, lse=lse_bound)

    do = np.where(is_row, with_heads(np.asarray(do).astype(np.float64)), 0)
    dlse = 0.0 if dlse is None else np.where(is_row, np.asarray(dlse).astype(np.float64).reshape(is_row.shape), 0)
    shapes = np.shape(q), np.shape(k), np.shape(v)
    tolerances = _gradient_tolerances(queries, keys, values, do, dlse, scale, model, forward, shapes)
    return Bounds(o=o_bound, lse=lse_bound, dq=tolerances[0], dk=tolerances[1], dv=tolerances[2])


def _forward_tolerances(
    queries: Array, keys: Array, values: Array, allowed: Array, scale: float, model: _Rounding
) -> _Forward:
    seqlen_kv, head_dim = keys.shape[-2:]
    ua, k_n = model.ua, model.k(seqlen_kv)
    is_row = allowed.any(axis=-1, keepdims=True)

    transposed = np.swapaxes(keys, -1, -2)
    score = np.where(allowed, scale * (queries @ transposed), 0)
    mass = np.where(allowed, abs(scale) * (np.abs(queries) @ np.abs(transposed)), 0)
    row_max = np.max(score, axis=-1, keepdims=True, initial=-np.inf, where=allowed)
    row_max = np.where(is_row, row_max, 0)
    row_sum = np.sum(np.exp(score - row_max), axis=-1, keepdims=True, where=allowed)
    lse = row_max + np.log(np.where(is_row, row_sum, 1))
    log_p = np.where(allowed, score - lse, -np.inf)
    p = np.exp(log_p)

    e_score = ((model.k(head_dim) + 4) * ua + model.t) * mass
    eta = e_score + 4 * ua * (np.abs(score) + np.abs(row_max)) + 4 * ua
    p_excess = _excess(log_p, p, eta)
    r = p_excess.sum(axis=-1, keepdims=True)
    tol_lse = np.log1p(r) + (k_n + 8) * ua + 4 * ua * (np.abs(row_max) + np.abs(lse))

    o = p @ values
    lost = np.minimum(p, model.wp * np.exp(row_max - lse))
    rounding = model.up + model.t + 2 * (k_n + 8) * ua
    first = (p_excess + lost + rounding * (p + p_excess)) @ np.abs(values)
    by_weights = (1 + r) * (first + r * np.abs(o)) + model.u * np.abs(o)
    tol_o = np.fmin(by_weights, _spread(values, rounding + seqlen_kv * model.wp + model.u))
    tol_o = tol_o + model.w + seqlen_kv * model.wa
    return _Forward(
        score=score,
        p=p,
        log_p=log_p,
        eta=eta,
        lse=lse,
        o=o,
        tol_lse=np.where(is_row, tol_lse, 0),
        tol_o=np.where(is_row, tol_o, 0),
    )


def _gradient_tolerances(
    queries: Array,
    keys: Array,
    values: Array,
    do: Array,
    dlse: Array | float,
    scale: float,
    model: _Rounding,
    forward: _Forward,
    shapes: tuple[tuple[int, ...], ...],
) -> list[Array]:
    """The bounds on dq, dk and dv, in the shapes of q, k and v."""
    ua, wa = model.ua, model.wa
    p, o = forward.p, forward.o
    seqlen_q, seqlen_kv, value_dim = queries.shape[-2], keys.shape[-2], values.shape[-1]
    size = math.prod(p.shape[:-2])
    # How many rows add up to one row of each gradient.
    terms_q, terms_k, terms_v = (
        rows * (size // max(1, math.prod(shape[:-2]))) for rows, shape in zip((seqlen_kv, seqlen_q, seqlen_q), shapes)
    )

    eta = forward.eta + forward.tol_lse + 4 * ua * (np.abs(forward.score) + np.abs(forward.lse))
    p_excess = _excess(forward.log_p, p, eta)
    p_larger = p + p_excess

    abs_do = np.abs(do)
    dp = do @ np.swapaxes(values, -1, -2)
    d = np.sum(do * o, axis=-1, keepdims=True)
    k_dv = model.k(value_dim) + 2
    e_dp = (k_dv * ua + model.t) * (abs_do @ np.swapaxes(np.abs(values), -1, -2)) + value_dim * wa
    e_d = np.sum(abs_do * (forward.tol_o + k_dv * ua * (np.abs(o) + forward.tol_o)), axis=-1, keepdims=True)
    g = dp - d + dlse
    e_g = e_dp + e_d + value_dim * wa + 2 * ua * (np.abs(dp) + np.abs(d) + np.abs(dlse))

    ds = p * g
    is_allowed = ~np.isneginf(forward.log_p)
    g_larger = np.abs(g) + e_g
    e_ds = (p_excess + np.minimum(p, wa) + 2 * ua * p_larger) * g_larger + p * e_g + wa
    e_ds = np.where(is_allowed, e_ds, 0)
    ds_larger = np.abs(ds) + e_ds
    t_ds = e_ds + model.up * ds_larger + np.minimum(ds_larger, model.wp)
    t_ds = np.where(np.abs(ds) + SECOND_ORDER * t_ds > model.largest_product, np.inf, t_ds)

    tol_dq = abs(scale) * ((t_ds + ((model.k(terms_q) + 8) * ua + model.t) * ds_larger) @ np.abs(keys))
    transposed = np.swapaxes(t_ds + ((model.k(terms_k) + 8) * ua + model.t) * ds_larger, -1, -2)
    tol_dk = abs(scale) * (transposed @ np.abs(queries))
    lost = np.minimum(p, max(model.wp, wa))
    weights = p_excess + lost + (model.up + model.t + (model.k(terms_v) + 2) * ua) * p_larger
    tol_dv = np.swapaxes(np.where(is_allowed, weights, 0), -1, -2) @ abs_do

    q_shape, k_shape, v_shape = shapes
    exact = (
        sum_to(scale * (ds @ keys), q_shape),
        sum_heads_to(scale * (np.swapaxes(ds, -1, -2) @ queries), k_shape),
        sum_heads_to(np.swapaxes(p, -1, -2) @ do, v_shape),
    )
    tolerances = sum_to(tol_dq, q_shape), sum_heads_to(tol_dk, k_shape), sum_heads_to(tol_dv, v_shape)
    underflows = ((1 + abs(scale)) * terms * wa + model.w for terms in (terms_q, terms_k, terms_v))
    return [
        _finished(tolerance + model.u * np.abs(gradient) + underflow, gradient, model)
        for tolerance, gradient, underflow in zip(tolerances, exact, underflows)
    ]


def _excess(log_p: Array, p: Array, eta: Array) -> Array:
    """p (exp(eta) - 1), also where exp(eta) overflows and p underflows."""
    return np.where(eta < 1, p * np.expm1(np.minimum(eta, 1)), np.exp(log_p + eta))


def _spread(values: Array, rounding: float) -> Array:
    """How far a weighted mean of the rows of v can be from another one, with that relative rounding of the result."""
    if not values.shape[-2]:
        return np.zeros((*values.shape[:-2], 1, values.shape[-1]))
    largest, smallest = (reduce(values, axis=-2, keepdims=True) for reduce in (np.max, np.min))
    return largest - smallest + rounding * np.maximum(np.abs(largest), np.abs(smallest))


def _finished(tolerance: Array, exact: Array, model: _Rounding) -> Array:
    """The published bound: the margin for second-order terms, and inf where the storage dtype may overflow."""
    bound = _nan_to_inf(SECOND_ORDER * tolerance)
    return np.where(np.abs(exact) + bound > model.largest, np.inf, bound)


def _nan_to_inf(bound: Array) -> Array:
    return np.where(np.isnan(bound), np.inf, bound)
