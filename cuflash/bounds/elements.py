"""The public error bound: checks of the arguments, then bounds on the forward pass and the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import E4M3, Array, as_dtype, describe, flag_reasons, to_host
from ..calls._call import Call, composed_score
from ..dropout import Dropout
from ..errors import UnsupportedProblem, collecting, refuse
from ..fp8 import operands as fp8
from ..fp8.cuts import Cuts
from ..keywords import explains_keywords
from ..masks.places import Places
from ..planning.dropout_launches import SEED
from ..planning.options import Causality, MaskLike, Options, ScoreLike
from ..planning.staged_array import gradient_in_parts
from ..plans.fit import as_planned
from ..plans.plan import Plan
from ..reference import with_heads
from ..scores.values import Operands as ProgramOperands
from .captured import Captured
from .forward import Operands, forward_tolerances
from .gradients import Cotangents, delta_of, gradient_tolerances, sink_tolerance
from .host import cotangent_reasons, host_arrays, host_tangents
from .rounding import SECOND_ORDER, Rounding, limits, nan_to_inf, rounded_up
from .tangents import Dots, published, push_tolerances, rows_of, second_bounds


@explains_keywords
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bounds:
    """Bounds on the error of each element of a result, as float64 arrays.

    Parameters
    ----------
    o, lse : array
        Shapes as returned by `attention`.
    dq, dk, dv : array or None
        Shapes of q, k, v; None without `do`.
    dsink : array or None
        Shape of sink; None without `do` or without a sink.
    others : dict of arrays by name
        Bounds on the gradients of the score function's arrays that `wrt` names, if `do` is present.
    o_dot, lse_dot : array or None
        Bounds on the tangents, if `tangents` are present.
    dq_dot, dk_dot, dv_dot, dsink_dot, others_dot : array or None
        Bounds on the tangents of gradients, if both `do` and `tangents` are present.

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
    o_dot: Array = None
    lse_dot: Array = None
    dq_dot: Array = None
    dk_dot: Array = None
    dv_dot: Array = None
    dsink_dot: Array = None
    others_dot: Mapping[str, Array] = field(default_factory=dict)


@explains_keywords
def error_bound(
    q: Array,
    k: Array,
    v: Array,
    do: Array | None = None,
    *,
    dlse: Array | None = None,
    mask: MaskLike | None = None,
    causal: Causality = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    score: ScoreLike | None = None,
    softcap: float | None = None,
    bias: Array | None = None,
    wrt: str | Sequence[str] = (),
    sink: Array | None = None,
    dropout: Dropout | None = None,
    precision: str = "ieee",
    q_start: int = 0,
    kv_start: int = 0,
    product_dtype: DTypeLike | None = None,
    probable: bool = False,
    plan: Plan | None = None,
    tangents: Mapping[str, Array] | None = None,
) -> Bounds:
    """Bound the error of every element of attention and its gradients, against exact arithmetic on the same inputs.

    Parameters
    ----------
    q, k, v : arrays
        As in `attention`. Their values are taken as exact, those of `Quantized` arrays after dequantization;
        `quantization_bound` bounds the change by quantization. The values of bias, sink and captured arrays are taken
        as exact, too: if they are float64 and q is narrower, the bound includes their cast to float32.
    do : array, optional
        The gradient of o. If present, the gradients are bounded, too.
    dlse : array, optional
        The gradient of lse; default: zero.
    mask, causal, window, scale, score, softcap, bias : optional
        As in `attention`.
    wrt : str or sequence of str
        As in `attention_vjp`.
    sink, dropout, precision, q_start, kv_start : optional
        As in `attention`.
    product_dtype : dtype, optional
        The dtype to which P and dS are rounded before they multiply v, do, k and q. Default: the accumulator's dtype,
        as in the `cpu` executor; kernels on tensor cores round to float16 or bfloat16. For `Quantized` operands,
        float8_e4m3fn selects the kernels' arithmetic, in which tensor cores also truncate sums.
    probable : bool
        If True, assume that a sum of n terms has an error of min(n, 6 sqrt(n)) roundoffs instead of n. This is not a
        guarantee (rounding errors that all have the same sign can exceed it), but with thousands of keys it detects far
        smaller faults; Higham and Mary, A new approach to probabilistic rounding error analysis (SIAM J. Sci. Comput.
        41, 2019).
    plan : Plan, optional
        A plan from `cuflash.plan`, whose results are bounded: its mask, scale, score function, dropout and precision
        are used, and the dtype to which its kernels round P and dS. With it, only the options `sink`, `probable` and
        `tangents` are allowed.
    tangents : dict of arrays by name, optional
        Tangents of arrays of the call, including "q", "k", "v", "sink", "do" and "dlse". If present, the results of
        `attention_jvp` are bounded, too, and with `do` those of `attention_hvp`.

    Returns
    -------
    Bounds
        Each element of a result is within its bound of the exact one. Rows without a key have bound 0, since o is 0 and
        lse is -inf, or the sink, exactly; except that a float64 sink with narrower q is rounded. A bound is infinite if
        nothing is guaranteed: for a result, or a sum from which it is computed, that may overflow its dtype, for
        gradients from a dS that may overflow the dtype to which it is rounded (65504 in float16), and for scores so
        large (around 10^6 in float32) that exp(score) has no correct digit.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`.

    Notes
    -----
    Needs about ten float64 arrays of shape [*batch, num_heads, seqlen_q, seqlen_kv] and the time of a few `reference`
    calls. For float64 inputs the exact result needs more than float64: pass long doubles to `reference`. For the
    derivation, see the docstring of `cuflash.bounds`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash import reference
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 4, 100, 32))
    >>> exact, _ = reference.attention(q, k, v)
    >>> rounded = exact.astype(np.float16)
    >>> bound = error_bound(q.astype(np.float16), k.astype(np.float16), v.astype(np.float16)).o
    >>> bound.shape, bool(bound.max() < 2e-3)
    ((4, 100, 32), True)
    >>> halves = [x.astype(np.float16) for x in (q, k, v)]
    >>> ready = cuflash.plan(*halves, causal=True, device=cuflash.DeviceSpec.gpu("H100"))
    >>> of_kernels, of_host = error_bound(*halves, plan=ready).o, error_bound(*halves, causal=True).o
    >>> bool((of_kernels > of_host).any())                      # the kernels round P to float16 too
    True
    """
    options = Options(
        mask, causal, window, scale, score, softcap, bias, None, dropout, wrt, precision=precision, q_start=q_start,
        kv_start=kv_start,
    )  # fmt: skip
    if plan is not None:
        return _bounds_of_plan(plan, (q, k, v), do, dlse, sink, options, product_dtype, probable, tangents)
    reasons, storage, quantized = flag_reasons("probable", probable), None, (q, k, v)
    if fp8.are_quantized(q, k, v):
        reasons += fp8.bound_reasons(q, k, v, do, precision)
        refuse(reasons)
        storage, (q, k, v) = v.source_dtype, (x.scaled(np.float64) for x in (q, k, v))
    q, k, v, do, dlse, sink = host_arrays({"q": q, "k": k, "v": v, "do": do, "dlse": dlse, "sink": sink})
    call = None
    with collecting(reasons):
        product_dtype = None if product_dtype is None else _product_dtype(product_dtype)
    with collecting(reasons):
        # A call on the simulator may have any precision.
        call = Call.of(q, k, v, options._replace(sink=sink, executor="sim"))
    if call is not None:
        reasons += cotangent_reasons("do", do, call.problem.o_shape())
        reasons += cotangent_reasons("dlse", dlse, call.problem.lse_shape())
        tangents = host_tangents(reasons, tangents, call.problem)
    if reasons or call is None:
        raise UnsupportedProblem(reasons)
    problem, composed = call.problem, composed_score(options, q)
    allowed = call.mask.toarray(**problem.mask_shape._asdict())
    model = Rounding.of(storage or problem.dtype, precision, product_dtype, probable)
    cuts = Cuts.of(*quantized) if storage is not None and product_dtype == E4M3 else None
    if storage is not None:
        model = model.of_quantized(are_products_cut=cuts is not None)
    captured = None if composed is None else Captured.of(composed, problem)
    operands = Operands.of((q, k, v), sink, allowed, problem, model, captured, dropout, cuts)
    return _dense_bounds(operands, do, dlse, tangents or {})


def _bounds_of_plan(
    plan: Plan,
    qkv: tuple[Array, Array, Array],
    do: Array | None,
    dlse: Array | None,
    sink: Array | None,
    options: Options,
    product_dtype: DTypeLike | None,
    probable: bool,
    tangents: Mapping[str, Array] | None,
) -> Bounds:
    """Return `error_bound` of a plan; `options` and `product_dtype` must have their defaults."""
    if not isinstance(plan, Plan):
        raise UnsupportedProblem(f"plan must be a Plan or None; got {describe(plan)}: create one with cuflash.plan")
    passed = {**options._asdict(), "product_dtype": product_dtype}
    usual = {**Options()._asdict(), "product_dtype": None}
    reasons = [
        f"{name} must be left out if plan is passed, which has its own; got {describe(value)}"
        for name, value in passed.items()
        if type(value) is not type(usual[name]) or value != usual[name]
    ]
    reasons += flag_reasons("probable", probable)
    if fp8.are_quantized(*qkv):
        raise UnsupportedProblem([*reasons, "plan must be None for Quantized q, k and v: plans are for plain arrays"])
    arrays = dict(zip("qkv", qkv)) | {"do": do, "dlse": dlse, "sink": sink}
    q, k, v, do, dlse, sink = host_arrays(as_planned(plan._plan.problem, arrays))
    problem = plan._plan.problem
    reasons += _planned_reasons(plan, {"q": q, "k": k, "v": v, "sink": sink})
    reasons += cotangent_reasons("do", do, problem.o_shape())
    reasons += cotangent_reasons("dlse", dlse, problem.lse_shape())
    tangents = host_tangents(reasons, tangents, problem)
    refuse(reasons)
    allowed = plan._plan.mask.to(to_host).toarray(**problem.mask_shape._asdict())
    model = Rounding.of(problem.dtype, problem.precision, plan._plan.product_dtype, probable)
    captured = dropout = None
    if problem.score is not None:
        held = [to_host(plan._captured[array.name]) for array in problem.score.arrays]
        of_program = ProgramOperands(problem.numbers, held, problem.whole_shape.batch)
        parts = gradient_in_parts(problem)
        captured = Captured(problem.score, of_program, problem.wrt, parts, problem.places or Places())
    if problem.dropout is not None:
        seed, offset = plan._numbers
        dropout = Dropout(1 - 1 / problem.dropout.factor, plan._captured.get(SEED, seed), offset)
    operands = Operands.of((q, k, v), sink, allowed, problem, model, captured, dropout, None)
    return _dense_bounds(operands, do, dlse, tangents)


def _planned_reasons(plan: Plan, arguments: Mapping[str, Array | None]) -> list[str]:
    """Return why arguments do not match a plan, or why the plan lacks the arrays of its score function."""
    problem = plan._plan.problem
    wanted = {name: (shape, problem.dtype) for name, shape in problem.argument_shapes().items()}
    wanted |= {operand.name: (operand.shape, operand.dtype) for operand in problem.operands}
    reasons = []
    for name, array in arguments.items():
        if name not in wanted:
            reasons += [] if array is None else [f"{name} must be None, as planned; got {describe(array)}"]
        elif array is None or (tuple(array.shape), array.dtype) != wanted[name]:
            shape, dtype = wanted[name]
            reasons.append(f"{name} must have shape {shape} and dtype {dtype}, as planned; got {describe(array)}")
    return reasons + [
        f"plan must be created with the array {name}; got a plan with only its shape"
        for name in wanted
        if name not in arguments and name not in plan._captured
    ]


def _product_dtype(requested: DTypeLike | None) -> np.dtype:
    dtype = as_dtype("product_dtype", requested)
    try:
        limits(dtype)
    except ValueError as error:
        reason = f"product_dtype must be a floating-point dtype; got {dtype}: pass np.float16, for example"
        raise UnsupportedProblem(reason) from error
    return dtype


# Overflow to inf, and inf * 0, are valid here: an infinite bound guarantees nothing.
@np.errstate(over="ignore", invalid="ignore", under="ignore")
def _dense_bounds(
    operands: Operands, do: Array | None, dlse: Array | None, tangents: Mapping[str, Array]
) -> Bounds:
    """Return `error_bound` of operands; without tangents, the mapping is empty."""
    forward, model, captured = forward_tolerances(operands), operands.model, operands.captured
    of_rows = {"o": rounded_up(forward.tol_o, forward.o, model)}
    of_rows["lse"] = nan_to_inf(SECOND_ORDER * forward.tol_lse[..., 0])
    push = dots = None
    if tangents:
        dots = Dots.of(operands, forward, tangents)
        push = push_tolerances(operands, forward, dots, tangents)
        of_rows |= published(push, operands)
    has_heads = len(operands.shapes[0]) > 2
    bounds: dict[str, Any] = {name: bound if has_heads else bound[0] for name, bound in of_rows.items()}
    if do is None:
        return Bounds(**bounds)

    is_row, has_lse = rows_of(operands, forward)
    do = np.where(is_row, with_heads(np.asarray(do).astype(np.float64)), 0)
    dlse = 0.0 if dlse is None else np.where(has_lse, np.asarray(dlse).astype(np.float64).reshape(is_row.shape), 0)
    cotangents = Cotangents(do, dlse)
    df, e_df, tolerances = gradient_tolerances(operands, forward, cotangents)
    bounds |= zip(("dq", "dk", "dv"), tolerances)
    if operands.sink is not None:
        bounds["dsink"] = sink_tolerance(operands, forward, *delta_of(operands, forward, cotangents))
    if captured is not None and forward.final is not None:
        bounds["others"] = captured.tolerances(forward.final, df, e_df, model)
    if push is not None and dots is not None:
        bounds |= second_bounds(operands, forward, push, cotangents, dots)
    return Bounds(**bounds)
