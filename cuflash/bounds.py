"""Bounds on how far a correct result may be from the exact one, for each element, computed from the inputs.

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
whose n / b tiles each add once and rescale once (a product and an exp2, five roundoffs): b + 6 n / b <= n + 8. Kernels
that also divide by the row sum in each tile ("fa1") have tiles of b >= 8: b + 8 (n / b - 1) + 1 <= n + 8.

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

A score function f makes the scores that are above S from scale q . k, which errs as S does there. What it makes of that
error, e_f, and its derivatives f' by the score and f_a by a captured array, with their own errors, are those of
`cuflash.scores.roundoff`; dF stands for the dS above, and n for the number of scores that read an element of a::

    eta   = e_f + 4 ua (|F| + |m|) + 4 ua
    e_dS  = |f'| e_dF + e_f' (|dF| + e_dF) + 2 ua |f'| (|dF| + e_dF)
    tol_da = sum (e_dF |f_a| + (|dF| + e_dF) e_fa) + (k(n) + 8) ua sum (|dF| + e_dF) (|f_a| + e_fa) + u |da| + w

A sink. It is one more column, of an exact score s and without a value. Kernels merge it with the finished row (o, L'),
L' being the log-sum-exp without it: they weigh both by exp2 of differences from the larger of L' and s, so that its
weight relative to those of the keys is off by the roundings of L', of a difference, and of exp2 twice::

    eta_s = 4 ua (|m| + |L'|) + 2 ua (|s| + |L'|) + 8 ua           r += P_s (exp(eta_s) - 1)
    tol_L += 4 ua ((1 - P_s) |L'| + 1)                             tol_O: 4 ua more of sum_j P exp(eta) |v|
    eta_s' = tol_L + 4 ua (|s| + |L|) + 4 ua                       delta = D - dlse, e_delta = e_D + 2 ua (|D| + |dlse|)
    tol_ds = sum_i (P_s (exp(eta_s') - 1) + (k(n) + 4) ua P_s exp(eta_s')) (|delta| + e_delta) + P_s e_delta
             + u |ds| + w                                          with u and w of the sink's dtype

O is a weighted mean of the rows of v and of 0 then.

Dropout multiplies P by Z, which is 0 or 1 / (1 - p), where it multiplies v or dO, and multiplies dP by it. So do the
bounds, and where Z is not 0 two roundings more are in sum_j Z P exp(eta) |v|, in |Z dP| and in dV: those of 1 / (1 - p)
and of the product. O is 1 / (1 - p) times a weighted mean of some of the rows of v and of 0 then.

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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from .arrays import DTYPES, Array, accumulator_dtype, as_dtype, describe, flag_reasons, is_array, no_array
from .blocks.work_list import requested_mask
from .dropout import Dropout
from .errors import UnsupportedProblem, collecting
from .fp8 import operands as fp8
from .layouts import kind_of
from .planning.problem import Problem, with_operands
from .plans import as_arrays, as_mask_of_arrays
from .reference import allowed_of, expand_heads, sum_heads_to, sum_to, with_heads
from .scores import Score, library
from .scores.program import Program
from .scores.roundoff import Arithmetic, LoadErrors, ScoreErrors, score_errors
from .scores.values import Operands

__all__ = ["Bounds", "error_bound"]

SECOND_ORDER = 1.5
_OPERAND_ROUNDING = {"ieee": 0.0, "tf32": 2 * 2.0**-11 + 2.0**-22, "tf32x3": 8 * 2.0**-24}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bounds:
    """Bounds on the error of each element of a result, as float64 arrays.

    Parameters
    ----------
    o, lse : array
        Shaped as `attention` returns them.
    dq, dk, dv : array or None
        Shaped as q, k, v; None where no `do` was given.
    dsink : array or None
        Shaped as sink; None where no `do` or no sink was given.
    others : dict of arrays by name
        Of the gradients of a score function's arrays that `wrt` names, where `do` was given.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = np.ones((4, 8), np.float32)
    >>> bounds = error_bound(q, k, v)
    >>> bounds.o.shape, bounds.lse.shape, bounds.dq
    ((4, 8), (4,), None)
    """

    o: Array
    lse: Array
    dq: Array = None
    dk: Array = None
    dv: Array = None
    dsink: Array = None
    others: Mapping[str, Array] = field(default_factory=dict)


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
    score: Any = None,
    softcap: float | None = None,
    bias: Array | None = None,
    wrt: str | tuple[str, ...] = (),
    sink: Array | None = None,
    dropout: Dropout | None = None,
    precision: str = "ieee",
    product_dtype: Any = None,
    probable: bool = False,
) -> Bounds:
    """Bound the error of every element of attention and its gradients, against exact arithmetic on the same inputs.

    Parameters
    ----------
    q, k, v : arrays
        As in `attention`. Their values count as exact, those of `Quantized` ones as they are dequantised;
        `quantization_bound` says what quantisation changes.
    do : array, optional
        The gradient of o. With it the gradients are bounded too.
    dlse : array, optional
        The gradient of lse; zero unless given.
    mask, causal, window, scale, score, softcap, bias : optional
        As in `attention`.
    wrt : str or tuple of str
        As in `attention_vjp`.
    sink, dropout, precision : optional
        As in `attention`.
    product_dtype : dtype, optional
        The dtype that P and dS are rounded to before they multiply v, do, k and q. It is the accumulator's dtype unless
        given, as in the `cpu` executor; kernels on tensor cores round to float16 or bfloat16.
    probable : bool
        Let a sum of n terms err by min(n, 6 sqrt(n)) roundoffs instead of n. That is no guarantee any more (rounding
        errors that all point one way can exceed it), but at thousands of keys it sees far smaller faults; Higham and
        Mary, A new approach to probabilistic rounding error analysis (SIAM J. Sci. Comput. 41, 2019).

    Returns
    -------
    Bounds
        Each result is within its bound of the exact one, element by element. Rows with no key have bound 0, since o is
        0 and lse is -inf, or the sink, exactly. A bound is infinite where nothing is promised: for a result that its
        dtype may overflow, for gradients from a dS that may overflow the dtype it is rounded to (65504 in float16), and
        for scores so large (around 10^6 in float32) that exp(score) has no correct digit.

    Raises
    ------
    TypeError, UnsupportedProblem
        As `attention` does.

    Notes
    -----
    Takes some ten float64 arrays of [*batch, num_heads, seqlen_q, seqlen_kv] and the time of a few `reference` calls.
    For float64 inputs "exact" needs more than float64: give `reference` long doubles. The derivation
    heads this module's source.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import reference
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 4, 100, 32))
    >>> exact, _ = reference.attention(q, k, v)
    >>> rounded = exact.astype(np.float16)
    >>> bound = error_bound(q.astype(np.float16), k.astype(np.float16), v.astype(np.float16)).o
    >>> bound.shape, bool(bound.max() < 2e-3)
    ((4, 100, 32), True)
    """
    reasons, storage = flag_reasons("probable", probable), None
    if fp8.are_quantized(q, k, v):
        reasons += fp8.bound_reasons(q, k, v, do, precision)
        if reasons:
            raise UnsupportedProblem(reasons)
        storage, (q, k, v) = v.source_dtype, (x.scaled(np.float64) for x in (q, k, v))
    q, k, v, do, dlse, sink = _host_arrays({"q": q, "k": k, "v": v, "do": do, "dlse": dlse, "sink": sink})
    problem = composed = None
    with collecting(reasons):
        composed = library.composed(score, softcap, bias)
    with collecting(reasons):
        problem = Problem.of(q, k, v, scale=scale, precision=precision)
        problem = with_operands(problem, {"sink": sink}, wrt, composed, dropout)
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
    model = _Rounding.of(storage or problem.dtype, precision, product_dtype, probable)
    model = model if storage is None else model.of_quantized()
    captured = None if composed is None else _Captured.of(composed, problem)
    weights = _Weights.of(dropout, problem)
    return _dense_bounds(q, k, v, do, dlse, sink, allowed, problem.softmax_scale, model, captured, weights)


def _host_arrays(given: dict[str, Any]) -> list[Array]:
    """The arguments as NumPy's arrays; None where do, dlse and sink are not given."""
    arrays = as_arrays(given)
    for name, array in arrays.items():
        if not is_array(array) and name != "sink" and not (array is None and name in ("do", "dlse")):
            raise TypeError(no_array(name, array))
    reasons = [
        f"{name} must be a NumPy array; got {kind_of(array)}: copy it with its get()"
        for name, array in arrays.items()
        if is_array(array) and not isinstance(array, np.ndarray)
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
    largest_sum: float
    probable: bool

    @classmethod
    def of(cls, storage: np.dtype[Any], precision: str, product: Any, probable: bool) -> _Rounding:
        accumulator = accumulator_dtype(storage)
        product = accumulator if product is None else np.dtype(product)
        return cls(
            u=_roundoff(storage),
            ua=_roundoff(accumulator),
            up=_roundoff(product),
            t=_OPERAND_ROUNDING[precision],
            w=_underflow(storage),
            wa=_underflow(accumulator),
            wp=_underflow(product),
            largest=float(limits(storage).max),
            largest_product=float(limits(product).max),
            largest_sum=float(limits(accumulator).max),
            probable=probable,
        )

    def of_quantized(self) -> _Rounding:
        """Tolerances where operands are rounded to A as they are dequantised, and results to A before T."""
        return replace(self, t=2 * self.ua * (1 + self.ua), u=self.u if self.u == self.ua else self.u + 2 * self.ua)

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


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """Factors of the weights under dropout, the largest factor, and the number of roundings that it takes."""

    factors: Any = 1.0
    most: float = 1.0
    roundoffs: int = 0

    @classmethod
    def of(cls, dropout: Dropout | None, problem: Problem) -> _Weights:
        if dropout is None or problem.dropout is None:
            return cls()
        shape, factor = problem.mask_shape, problem.dropout.factor
        return cls(factor * dropout.keep((*shape.batch, *shape[1:])), factor, 2)

    @property
    def is_dropping(self) -> bool:
        return self.roundoffs > 0


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """A problem's score function with its arrays, and which of these have gradients."""

    program: Program
    operands: Operands
    wrt: tuple[str, ...]

    @classmethod
    def of(cls, score: Score, problem: Problem) -> _Captured:
        arrays = _host_arrays(dict(score.arrays))
        return cls(score.program, Operands(score.numbers, arrays, problem.batch), problem.wrt)

    def final(self, s: Array, e_s: Array, allowed: Array, model: _Rounding) -> ScoreErrors:
        """Final scores and derivatives, with errors; all of it is 0 where the mask is False."""
        arithmetic = Arithmetic(model.ua, model.wa, model.largest_sum)
        found = score_errors(self.program, self.operands, self.wrt, s, e_s, arithmetic)
        loads = (
            load._replace(value=np.where(allowed, load.value, 0), error=np.where(allowed, load.error, 0))
            for load in found.loads
        )
        f, e_f, slope, e_slope = (np.where(allowed, x, 0) for x in found[:4])
        return ScoreErrors(f, e_f, slope, e_slope, tuple(loads))

    def tolerances(self, final: ScoreErrors, df: Array, e_df: Array, model: _Rounding) -> dict[str, Array]:
        """The bounds on gradients of captured arrays by name, from those of final scores."""
        found = {}
        for number, array in enumerate(self.program.arrays):
            if array.name in self.wrt:
                loads = [load for load in final.loads if load.array == number]
                found[array.name] = _gradient_tolerance(self.operands.arrays[number], loads, df, e_df, model)
        return found


def _gradient_tolerance(array: Array, loads: list[LoadErrors], df: Array, e_df: Array, model: _Rounding) -> Array:
    """The bound on a captured array's gradient."""
    exact, tolerance, masses, counts = np.zeros((4, array.size))
    for load in loads:
        flat = np.ravel_multi_index(np.broadcast_arrays(*load.place), array.shape) if load.place else 0
        flat = np.broadcast_to(flat, df.shape).ravel()
        larger = np.abs(df) + e_df
        is_none = larger == 0  # whatever the derivative is there
        terms = e_df * np.abs(load.value) + larger * load.error
        mass = larger * (np.abs(load.value) + load.error)
        for total, x in ((exact, df * load.value), (tolerance, terms), (masses, mass)):
            np.add.at(total, flat, np.where(is_none, 0, x).ravel())
        np.add.at(counts, flat, 1)
    k = np.minimum(counts, 6 * np.sqrt(counts)) if model.probable else counts
    dtype = np.dtype(array.dtype)
    tolerance = tolerance + (k + 8) * model.ua * masses + _roundoff(dtype) * np.abs(exact) + counts * model.wa
    bound = _nan_to_inf(SECOND_ORDER * (tolerance + _underflow(dtype)))
    bound = np.where(np.abs(exact) + bound > float(limits(dtype).max), np.inf, bound)
    return bound.reshape(array.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Forward:
    """The exact forward pass and its unscaled tolerances, as far as the backward needs them."""

    allowed: Array
    score: Array  # final, 0 where masked
    p: Array
    log_p: Array  # -inf where masked
    eta: Array
    lse: Array  # [..., rows, 1], 0 in empty rows
    o: Array
    tol_lse: Array  # [..., rows, 1]
    tol_o: Array
    final: ScoreErrors | None
    log_p_sink: Array  # [..., rows, 1], -inf without a sink
    weights: _Weights


# Overflow to inf, and inf * 0, are answers here: "nothing is promised".
@np.errstate(over="ignore", invalid="ignore", under="ignore")
def _dense_bounds(
    q: Array,
    k: Array,
    v: Array,
    do: Array | None,
    dlse: Array | None,
    sink: Array | None,
    mask: Array | None,
    scale: float,
    model: _Rounding,
    captured: _Captured | None,
    weights: _Weights,
) -> Bounds:
    """`error_bound` with the mask as a bool array, or None, and the scale as a number."""
    batch = np.broadcast_shapes(*(np.shape(x)[:-3] for x in (q, k, v)))
    queries = with_heads(np.asarray(q).astype(np.float64))
    num_heads = queries.shape[-3]
    allowed = allowed_of(mask, (*batch, num_heads, np.shape(q)[-2], np.shape(k)[-2]))
    # Keys that no query attends, and rows without a key, change no result, whatever they hold.
    is_seen = allowed.any(axis=-2)[..., None]
    is_row = allowed.any(axis=-1)[..., None]
    queries = np.where(is_row, queries, 0)
    keys, values = (np.where(is_seen, expand_heads(np.asarray(x).astype(np.float64), num_heads), 0) for x in (k, v))

    logit = np.full((), -np.inf) if sink is None else np.atleast_1d(sink).astype(np.float64)[..., None, None]

    forward = _forward_tolerances(queries, keys, values, allowed, scale, logit, model, captured, weights)
    is_row = forward.allowed.any(axis=-1)[..., None]
    tol_o = _rounded_up(forward.tol_o, forward.o, model)
    tol_lse = _nan_to_inf(SECOND_ORDER * forward.tol_lse[..., 0])
    headed = np.ndim(q) > 2
    o_bound, lse_bound = (tol_o, tol_lse) if headed else (tol_o[0], tol_lse[0])
    if do is None:
        return Bounds(o=o_bound, lse=lse_bound)

    do = np.where(is_row, with_heads(np.asarray(do).astype(np.float64)), 0)
    counts = is_row | ~np.isneginf(logit)
    dlse = 0.0 if dlse is None else np.where(counts, np.asarray(dlse).astype(np.float64).reshape(is_row.shape), 0)
    shapes = np.shape(q), np.shape(k), np.shape(v)
    df, e_df, tolerances = _gradient_tolerances(queries, keys, values, do, dlse, scale, model, forward, shapes)
    dq, dk, dv = tolerances
    dsink = None if sink is None else _sink_tolerance(values, do, dlse, logit, model, forward, sink)
    others = {} if captured is None or forward.final is None else captured.tolerances(forward.final, df, e_df, model)
    return Bounds(o=o_bound, lse=lse_bound, dq=dq, dk=dk, dv=dv, dsink=dsink, others=others)


def _forward_tolerances(
    queries: Array,
    keys: Array,
    values: Array,
    allowed: Array,
    scale: float,
    logit: Array,
    model: _Rounding,
    captured: _Captured | None,
    weights: _Weights,
) -> _Forward:
    seqlen_kv, head_dim = keys.shape[-2:]
    ua, k_n = model.ua, model.k(seqlen_kv)
    has_sink = ~np.isneginf(logit)

    transposed = np.swapaxes(keys, -1, -2)
    score = np.where(allowed, scale * (queries @ transposed), 0)
    mass = np.where(allowed, abs(scale) * (np.abs(queries) @ np.abs(transposed)), 0)
    e_score = ((model.k(head_dim) + 4) * ua + model.t) * mass
    final = None
    if captured is not None:
        final = captured.final(score, e_score + head_dim * model.wa * abs(scale), allowed, model)
        allowed = allowed & ~(np.isneginf(final.f) & (final.e_f == 0))  # the function hides them
        score, e_score = (np.where(allowed, x, 0) for x in final[:2])
    is_row = allowed.any(axis=-1, keepdims=True)
    row_max = np.max(score, axis=-1, keepdims=True, initial=-np.inf, where=allowed)
    row_max = np.where(is_row, row_max, 0)
    row_sum = np.sum(np.exp(score - row_max), axis=-1, keepdims=True, where=allowed)
    lse_of_keys = row_max + np.log(np.where(is_row, row_sum, 1))
    lse = np.logaddexp(np.where(is_row, lse_of_keys, -np.inf), logit)
    lse = np.where(np.isneginf(lse), 0, lse)
    log_p_sink = np.broadcast_to(logit - lse, lse.shape)
    log_p = np.where(allowed, score - lse, -np.inf)
    p = np.exp(log_p)

    eta = e_score + 4 * ua * (np.abs(score) + np.abs(row_max)) + 4 * ua
    eta = np.where(allowed, eta, 0)
    p_excess = _excess(log_p, p, eta)
    abs_max, abs_lse, abs_sink = np.abs(row_max), np.abs(lse_of_keys), np.abs(np.where(has_sink, logit, 0))
    eta_sink = 4 * ua * (abs_max + abs_lse) + 2 * ua * (abs_sink + abs_lse) + 8 * ua
    p_sink = np.exp(log_p_sink)
    r = p_excess.sum(axis=-1, keepdims=True) + _excess(log_p_sink, p_sink, eta_sink)
    tol_lse = np.log1p(r) + (k_n + 8) * ua + 4 * ua * (abs_max + np.abs(lse))
    tol_lse = tol_lse + has_sink * 4 * ua * ((1 - p_sink) * abs_lse + 1)

    z, z_rounding = weights.factors, weights.roundoffs * ua
    o = (z * p) @ values
    lost = np.minimum(p, model.wp * np.exp(row_max - lse))
    rounding = model.up + model.t + 2 * (k_n + 8) * ua + has_sink * 4 * ua + z_rounding
    first = (z * (p_excess + lost + rounding * (p + p_excess))) @ np.abs(values)
    by_weights = (1 + r) * (first + r * np.abs(o)) + model.u * np.abs(o)
    of_mean = _rounding_of_sum(values, rounding + seqlen_kv * model.wp + model.u, has_sink | weights.is_dropping)
    tol_o = np.fmin(by_weights, weights.most * of_mean)
    tol_o = tol_o + model.w + seqlen_kv * model.wa
    return _Forward(
        allowed=allowed,
        score=score,
        p=p,
        log_p=log_p,
        eta=eta,
        lse=lse,
        o=o,
        tol_lse=np.where(is_row, tol_lse, 0),
        tol_o=np.where(is_row, tol_o, 0),
        final=final,
        log_p_sink=log_p_sink,
        weights=weights,
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
) -> tuple[Array, Array, list[Array]]:
    """The gradient of final scores and its error; then the bounds on dq, dk and dv, in the shapes of q, k and v."""
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
    z, z_rounding = forward.weights.factors, forward.weights.roundoffs * ua
    dp = z * (do @ np.swapaxes(values, -1, -2))
    d = np.sum(do * o, axis=-1, keepdims=True)
    k_dv = model.k(value_dim) + 2
    e_dp = (k_dv * ua + model.t + z_rounding) * (abs_do @ np.swapaxes(np.abs(values), -1, -2)) + value_dim * wa
    e_dp = z * e_dp
    e_d = np.sum(abs_do * (forward.tol_o + k_dv * ua * (np.abs(o) + forward.tol_o)), axis=-1, keepdims=True)
    g = dp - d + dlse
    e_g = e_dp + e_d + value_dim * wa + 2 * ua * (np.abs(dp) + np.abs(d) + np.abs(dlse))

    ds = p * g
    is_allowed = ~np.isneginf(forward.log_p)
    g_larger = np.abs(g) + e_g
    e_ds = (p_excess + np.minimum(p, wa) + 2 * ua * p_larger) * g_larger + p * e_g + wa
    df, e_df = ds, np.where(is_allowed, e_ds, 0)
    ds, e_ds = (df, e_df) if forward.final is None else _through_slope(forward.final, df, e_df, model)
    ds_larger = np.abs(ds) + e_ds
    t_ds = e_ds + model.up * ds_larger + np.minimum(ds_larger, model.wp)
    t_ds = np.where(np.abs(ds) + SECOND_ORDER * t_ds > model.largest_product, np.inf, t_ds)

    tol_dq = abs(scale) * ((t_ds + ((model.k(terms_q) + 8) * ua + model.t) * ds_larger) @ np.abs(keys))
    transposed = np.swapaxes(t_ds + ((model.k(terms_k) + 8) * ua + model.t) * ds_larger, -1, -2)
    tol_dk = abs(scale) * (transposed @ np.abs(queries))
    lost = np.minimum(p, max(model.wp, wa))
    weights = z * (p_excess + lost + (model.up + model.t + (model.k(terms_v) + 2) * ua + z_rounding) * p_larger)
    tol_dv = np.swapaxes(np.where(is_allowed, weights, 0), -1, -2) @ abs_do

    q_shape, k_shape, v_shape = shapes
    exact = (
        sum_to(scale * (ds @ keys), q_shape),
        sum_heads_to(scale * (np.swapaxes(ds, -1, -2) @ queries), k_shape),
        sum_heads_to(np.swapaxes(z * p, -1, -2) @ do, v_shape),
    )
    tolerances = sum_to(tol_dq, q_shape), sum_heads_to(tol_dk, k_shape), sum_heads_to(tol_dv, v_shape)
    underflows = ((1 + abs(scale)) * terms * wa + model.w for terms in (terms_q, terms_k, terms_v))
    return df, e_df, [
        _rounded_up(tolerance + model.u * np.abs(gradient) + underflow, gradient, model)
        for tolerance, gradient, underflow in zip(tolerances, exact, underflows)
    ]


def _through_slope(final: ScoreErrors, df: Array, e_df: Array, model: _Rounding) -> tuple[Array, Array]:
    """dS and its error from the gradient of final scores; 0 where that is 0 without error, whatever the slope is."""
    larger, slope = np.abs(df) + e_df, np.abs(final.slope)
    e_ds = slope * e_df + final.e_slope * larger + 2 * model.ua * slope * larger + model.wa
    is_none = larger == 0
    return np.where(is_none, 0, df * final.slope), np.where(is_none, 0, e_ds)


def _sink_tolerance(
    values: Array, do: Array, dlse: Array | float, logit: Array, model: _Rounding, forward: _Forward, sink: Array
) -> Array:
    """The bound on dsink, in the shape of the sink."""
    ua, wa, value_dim = model.ua, model.wa, values.shape[-1]
    k_dv = model.k(value_dim) + 2
    p_sink = np.exp(forward.log_p_sink)
    d = np.sum(do * forward.o, axis=-1, keepdims=True)
    abs_o, abs_do = np.abs(forward.o), np.abs(do)
    e_d = np.sum(abs_do * (forward.tol_o + k_dv * ua * (abs_o + forward.tol_o)), axis=-1, keepdims=True)
    delta, e_delta = d - dlse, e_d + 2 * ua * (np.abs(d) + np.abs(dlse)) + value_dim * wa
    larger = np.abs(delta) + e_delta

    abs_sink = np.abs(np.where(np.isneginf(logit), 0, logit))
    eta = forward.tol_lse + 4 * ua * (abs_sink + np.abs(forward.lse)) + 4 * ua
    excess = _excess(forward.log_p_sink, p_sink, eta)
    terms = p_sink.size // max(1, sink.size)
    rounding = (model.k(terms) + 4) * ua
    each = (excess + np.minimum(p_sink, wa) + rounding * (p_sink + excess)) * larger + p_sink * e_delta
    exact = sum_to(np.sum(-p_sink * delta, axis=(-1, -2)), sink.shape)
    own = replace(model, u=_roundoff(sink.dtype), w=_underflow(sink.dtype), largest=float(limits(sink.dtype).max))
    tolerance = sum_to(np.sum(each, axis=(-1, -2)), sink.shape) + terms * wa + own.u * np.abs(exact) + own.w
    return _rounded_up(tolerance, exact, own)


def _excess(log_p: Array, p: Array, eta: Array) -> Array:
    """p (exp(eta) - 1), also where exp(eta) overflows and p underflows."""
    return np.where(eta < 1, p * np.expm1(np.minimum(eta, 1)), np.exp(log_p + eta))


def _rounding_of_sum(values: Array, rounding: Array, has_sink: Array) -> Array:
    """How far a weighted mean of the rows of v can be from another one, with that relative rounding of the result.

    With a sink 0 is one of the rows.
    """
    if not values.shape[-2]:
        return np.zeros((*values.shape[:-2], 1, values.shape[-1]))
    largest, smallest = (reduce(values, axis=-2, keepdims=True) for reduce in (np.max, np.min))
    largest = np.where(has_sink, np.maximum(largest, 0), largest)
    smallest = np.where(has_sink, np.minimum(smallest, 0), smallest)
    return largest - smallest + rounding * np.maximum(np.abs(largest), np.abs(smallest))


def _rounded_up(tolerance: Array, exact: Array, model: _Rounding) -> Array:
    """The published bound: the margin for second-order terms, and inf where the storage dtype may overflow."""
    bound = _nan_to_inf(SECOND_ORDER * tolerance)
    return np.where(np.abs(exact) + bound > model.largest, np.inf, bound)


def _nan_to_inf(bound: Array) -> Array:
    return np.where(np.isnan(bound), np.inf, bound)
