"""Plans for masks from which kernels compute block lists or row intervals on the device, once per plan.

All masks of one layout (shapes and dtypes) share the launches of one plan, but each has its own lists.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ..arrays import Array
from ..blocks.index import BlockIndex
from ..blocks.index_mask import IndexMask
from ..errors import UnsupportedProblem
from ..executors import checks, gpu
from ..executors._layout_key import layout_key
from ..masks.one_array import at_each_call
from ..planning._call_cache import CALLS
from ..planning.dropout_launches import numbers_of
from ..planning.list_kernels import AT_CALL, ListedAtCall, WorkAtCall
from ..planning.lookup import lookup
from ..planning.options import Options
from ..planning.plan import KernelPlan
from ..plans.plan import ListsOfPlan, Plan
from ._forward import with_known_arrays, with_one_score
from ._call import planned


def listed_plan(q: Array, k: Array, v: Array, options: Options) -> Plan | None:
    """Return a plan with lists that kernels build now, if they support this mask on the GPU; None for any other call.

    Also return None for a call that must be refused; `planned` then raises all reasons.
    """
    if checks.is_on():
        return None
    with suppress(UnsupportedProblem):
        options, operands = with_one_score(options, q)
        arrays, _, options = with_known_arrays({"q": q, "k": k, "v": v, **operands}, {}, options)
        looked_up = lookup(options, layout_key)
        contents, key = looked_up.contents, looked_up.key("plan", layout_key(*arrays.values()), *operands)
        if contents is None or key is None:
            return None
        shared_call = CALLS.get(key)  # a plan for the layout, and the function that builds its lists
        if shared_call is None:
            options = options._replace(mask=at_each_call(options.mask))
            shared: Plan = planned(arrays["q"], arrays["k"], arrays["v"], options)._without_arrays()
            if not isinstance(shared._plan.work, WorkAtCall):
                return None
            shared_call = shared, gpu.lists_of_calls(shared._plan, shared._plan.work)
            CALLS.put(key, shared_call)
        shared, lists_of = shared_call
        captured = {name: array for name, array in arrays.items() if name not in ("q", "k", "v", "sink")}
        return _with_lists(shared, lists_of(*contents.arrays), captured, numbers_of(options.dropout))
    return None


def _with_lists(shared: Plan, lists: Array, captured: dict[str, Array], numbers: tuple[int, ...]) -> Plan:
    """Return the plan of a mask with these lists, or row intervals; `shared` is the plan for its layout."""
    kernel_plan: KernelPlan = shared._plan
    work = kernel_plan.work
    assert isinstance(work, WorkAtCall)
    if not isinstance(work, ListedAtCall):
        listed = replace(kernel_plan, work=work.with_results(lists))
    else:
        index: BlockIndex = replace(work.index, **work.source.fields_of(lists))
        listed = replace(kernel_plan, mask=IndexMask(index), work=replace(work, index=index))
    guard = gpu.current_target().guarded(listed, {AT_CALL: lists})
    plan = Plan(listed, shared.executor, {**captured, AT_CALL: lists}, numbers, _lists=ListsOfPlan(kernel_plan, guard))
    object.__setattr__(plan, "_owner", shared._owner)
    return plan
