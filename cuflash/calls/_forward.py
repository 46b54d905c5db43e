"""The forward pass of a call: repeated calls reuse a bound plan; other calls are planned, bound and cached."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from ..arrays import Array, ShapeDtype, flag_reasons, is_array, namespace
from ..errors import UnsupportedProblem, collecting, refuse
from ..executors import checks, gpu
from ..executors._bound_plan import BoundPlan
from ..executors._layout_key import layout_key
from ..fp8 import Quantized, kernel_calls, operands as fp8
from ..layouts import is_foreign
from ..masks.one_array import at_each_call
from ..planning.dropout_launches import numbers_of, seed_array
from ..planning.list_kernels import AT_CALL, WorkAtCall
from ..planning.lookup import lookup
from ..planning.options import Directions, Options
from ..planning.scales import RowsPerScale
from ..planning.tangents import shown
from ..plans.conversion import Out, as_arrays, as_mask_of_arrays, named_outputs, outputs_as_arrays
from ..plans.fit import require_fit, require_ready
from ..plans.plan import Plan, with_numbers
from ..scores import Score
from ._call import Call, composed_score, planned


class RepeatedCall(NamedTuple):
    """The plan and the bound pass of a repeated call.

    Attributes
    ----------
    plan : Plan
        The plan without the arrays of the call for which it was created.
    forward : BoundPlan
    lists_of : callable, optional
        Builds the lists of the mask from its arrays, if every call has to build them.
    """

    plan: Plan
    forward: BoundPlan
    lists_of: Callable[..., Array] | None


class Forward(NamedTuple):
    """A forward pass that has run.

    Attributes
    ----------
    plan : Plan
    arrays : dict by name
        The inputs of the pass, with the lists of the mask if the call built them.
    o, lse : array
        lse may be None if the caller does not need it.
    """

    plan: Plan
    arrays: dict[str, Array]
    o: Array
    lse: Array


def run(
    q: Array, k: Array, v: Array, options: Options, out: Out, return_lse: bool, later: Sequence[str] = ("backward",)
) -> Forward:
    """Run the forward pass of a call with the arguments of the user; only the first of identical calls checks them.

    `later` are the passes that the caller runs next, as in `Plan._bind`. If there are any, the result has lse whatever
    `return_lse` is, and a plan with the dropout seed.
    """
    options, operands = with_one_score(options, q)
    if isinstance(options.causal, np.bool):
        options = options._replace(causal=bool(options.causal))
    arrays: dict[str, Array] = {"q": q, "k": k, "v": v}
    rows: RowsPerScale | None = None
    facts: tuple[Hashable, ...] = ()
    if type(q) is Quantized or type(k) is Quantized or type(v) is Quantized:
        refuse(fp8.gradient_reasons(q, k, v) if later else [])
        options = options._replace(executor=fp8.executor_of(q, k, v, options.executor))
        _refuse_quantized(q, k, v, options, fp8.call_reasons(q, k, v, options.executor, out))
        if options.executor == "cpu":
            scaled = run(q.scaled(), k.scaled(), v.scaled(), options, None, return_lse, ())
            with np.errstate(all="ignore"):
                return scaled._replace(o=scaled.o.astype(v.source_dtype, copy=False))
        arrays, rows = kernel_calls.kernel_arrays(q, k, v), kernel_calls.rows_per_scale(q, k, v)
        facts = (v.source_dtype, q.shape, k.shape, v.shape, rows)
    arrays, outs = arrays | operands, {} if out is None else named_outputs(out)
    dots = options.tangents.arrays().values() if isinstance(options.tangents, Directions) else ()
    layout = layout_key(*arrays.values(), *outs.values(), *dots)
    if layout is None or options.mask is not None and is_foreign(options.mask):
        arrays, outs, options = with_known_arrays(arrays, outs, options)
        layout = layout_key(*arrays.values(), *outs.values(), *_arrays_of(options.tangents))
    looked_up = lookup(options, layout_key)
    contents, key = looked_up.contents, None
    wants_lse = bool(later) or return_lse
    if not checks.is_on() and type(return_lse) is bool:
        key = looked_up.key("attention", layout, *outs, wants_lse, *operands, *facts)
    call: RepeatedCall | None = looked_up.find(key)
    if call is None:
        snapshot = looked_up.snapshot()
        if looked_up.is_compared and snapshot is None:
            key = None
        options = options._replace(sink=arrays.get("sink"))
        if key is not None and contents is not None:
            options = options._replace(mask=at_each_call(options.mask))
        plan = _planned(q, k, v, arrays, outs, options, rows, flag_reasons("return_lse", return_lse))
        work, lists_of = plan._plan.work, None
        if isinstance(work, WorkAtCall) and contents is not None:
            lists_of = gpu.lists_of_calls(plan._plan, work)
            arrays[AT_CALL] = lists_of(*contents.arrays)
        elif contents is not None:
            key = None
        plan = plan._without_arrays()
        bound = plan._bind("forward", arrays, outs, wants_lse=wants_lse, pins=True, later=later)
        call = RepeatedCall(plan, bound, lists_of)
        if key is not None:
            looked_up.keep(key, call, snapshot)
    else:
        if contents is not None and call.lists_of is not None:
            arrays[AT_CALL] = call.lists_of(*contents.arrays)
        if outs and call.forward.may_overlap(arrays, outs):
            require_fit(call.plan._plan, call.plan.executor, "forward", arrays, outs)
    plan, numbers = call.plan, () if options.dropout is None else numbers_of(options.dropout)
    o, *lse = call.forward.run(arrays, outs, numbers)
    if later and numbers:
        plan = with_numbers(plan, numbers)
    return Forward(plan, arrays, o, lse[0] if lse else None)


def _planned(
    q: Array,
    k: Array,
    v: Array,
    arrays: dict[str, Array],
    outs: dict[str, Array],
    options: Options,
    rows: RowsPerScale | None,
    reasons: list[str],
) -> Plan:
    """Return the plan of a call after checking its arrays; with `rows`, q, k and v are `Quantized`.

    `reasons` are the caller's reasons to refuse the call.
    """
    if rows is None:
        if outs:
            with collecting(reasons):
                outs = outputs_as_arrays(outs)
        plan = planned(arrays["q"], arrays["k"], arrays["v"], options, reasons=reasons)
        require_fit(plan._plan, plan.executor, "forward", arrays, outs)
    else:
        refuse(kernel_calls.location_reasons(arrays))
        plan = planned(*kernel_calls.shapes(q, k, v), options, rows=rows, reasons=reasons)
        require_ready(plan._plan, plan.executor)
    return plan


def _refuse_quantized(q: Array, k: Array, v: Array, options: Options, reasons: list[str]) -> None:
    """Refuse `Quantized` operands if there are reasons, together with the reasons to refuse the other arguments."""
    if reasons and all(isinstance(x, Quantized) or is_array(x) for x in (q, k, v)):
        rows = None if options.executor == "cpu" else kernel_calls.rows_per_scale(q, k, v)
        q, k, v = (ShapeDtype(x.shape, np.dtype(np.float32)) for x in (q, k, v))
        Call.of(q, k, v, options, rows=rows, reasons=reasons)
    refuse(reasons)


def with_known_arrays(
    arrays: dict[str, Array], outs: dict[str, Array], options: Options
) -> tuple[dict[str, Array], dict[str, Array], Options]:
    """Return a call with other libraries' arrays converted by `as_arrays`; the plan refuses unsupported arguments."""
    arrays = as_arrays(arrays)
    if type(options.tangents) is Directions:
        options = options._replace(tangents=_known_directions(options.tangents, arrays))
    if outs:
        with suppress(UnsupportedProblem):
            outs = outputs_as_arrays(outs)
    if options.mask is not None:
        with suppress(UnsupportedProblem):
            executor = "gpu" if namespace(arrays["q"]).__name__ == "cupy" else "cpu"
            options = options._replace(mask=as_mask_of_arrays(options.mask, executor, arrays["q"]))
    return arrays, outs, options


def _arrays_of(tangents: Directions | str | Sequence[str]) -> list[Array]:
    """Return the arrays of a call's `Directions`; an empty list for a call without tangents."""
    return [*tangents.arrays().values()] if isinstance(tangents, Directions) else []


def _known_directions(directions: Directions, arrays: Mapping[str, Array]) -> Directions:
    """Return tangents and cotangents converted by `as_arrays`; a list gets the dtype of its array.

    Parameters
    ----------
    directions : Directions
    arrays : dict by name
        The other arrays of the call, converted by `as_arrays`.
    """
    known = as_arrays({**arrays, **directions.cotangents})
    named = {shown(name): each for name, each in directions.tangents.items()}
    dtypes = {shown(name): known[name].dtype for name in directions.tangents if hasattr(known.get(name), "dtype")}
    tangents = as_arrays({**known, **named}, dtypes)
    return directions._replace(
        cotangents={name: known[name] for name in directions.cotangents},
        tangents={name: tangents[shown(name)] for name in directions.tangents},
    )


_FIRST_OPERAND, _END_OF_OPERANDS = (Options._fields.index(name) for name in ("score", "wrt"))


def with_one_score(options: Options, q: Array = None) -> tuple[Options, dict[str, Array]]:
    """Return options with one Score instead of score, softcap and bias, and the call's arrays except q, k and v.

    A bias in a list becomes an array on the device of q.
    """
    score, softcap, bias, sink, dropout = options[_FIRST_OPERAND:_END_OF_OPERANDS]
    if score is softcap is bias is sink is dropout is None:
        return options, {}
    operands = ({} if sink is None else {"sink": sink}) | seed_array(dropout)
    if score is softcap is bias is None:
        return options, operands
    if softcap is bias is None and type(score) is Score:
        return options, operands | score.arrays
    try:
        composed = composed_score(options, q)
    except UnsupportedProblem:  # `planned` raises this again, with all other reasons
        return options, operands
    assert composed is not None
    one = *options[:_FIRST_OPERAND], composed, None, None, *options[_FIRST_OPERAND + 3 :]
    return Options._make(one), operands | composed.arrays
