"""Calls on operands of 8 bits by the kernels of a GPU or of the simulator; equal calls are looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..arrays import Array, is_array, namespace
from ..blocks.work_list import WorkList
from ..errors import refuse
from ..executors._layout_key import layout_key
from ..executors import checks, gpu
from ..fp8 import Quantized, kernel_calls
from ..masks.one_array import MaskContents, at_each_call
from ..planning.list_kernels import AT_CALL, WorkAtCall
from ..planning.lookup import lookup
from ..planning.options import Options
from ..planning.scales import RowsPerScale
from ..plans import Plan, as_arrays
from .checked_plan import planned
from .listed_plan import without_mask

_Call = Callable[..., Sequence[Array]]


def attention_on_kernels(q: Quantized, k: Quantized, v: Quantized, options: Options) -> tuple[Array, Array]:
    """Attention of quantised operands, and its lse.

    Parameters
    ----------
    q, k, v : Quantized
    options : Options
        The arguments of the call, with executor "gpu" or "sim".
    """
    options = options._replace(sink=as_arrays({"sink": options.sink})["sink"])
    rows, given = kernel_calls.rows_per_scale(q, k, v), kernel_calls.kernel_arrays(q, k, v)
    given |= {"sink": options.sink} if is_array(options.sink) else {}
    refuse(kernel_calls.location_reasons(given))
    looked_up = lookup(options, layout_key)
    is_kept = options.executor == "gpu" and not checks.is_on()
    layouts = layout_key(*given.values()) if is_kept else None
    key = looked_up.key("quantized", layouts, v.source_dtype, q.shape, k.shape, v.shape, rows)
    contents = None if key is None else looked_up.contents
    cached_call = looked_up.find(key)
    if cached_call is None:
        snapshot = looked_up.snapshot()
        asked = options if contents is None else options._replace(mask=at_each_call(options.mask))
        ready, work = _ready(q, k, v, asked, rows)
        if isinstance(work, WorkAtCall) and not ready.can_bind:
            ready, work = _ready(q, k, v, options, rows)
        if key is None or not ready.can_bind or isinstance(work, WorkAtCall) != (contents is not None):
            check = checks.Check(namespace(given["q"]), given) if checks.is_on() else None
            o, lse = ready._run_checked(given, check)
            gpu.pin(ready.plan)
            return o, lse
        cached_call = _bound(ready, given, contents)
        looked_up.keep(key, cached_call, snapshot)
    call, lists_of = cached_call
    if lists_of is not None and contents is not None:
        given[AT_CALL] = lists_of(*contents.arrays)
    o, lse = call(*given.values())
    return o, lse


def _ready(q: Quantized, k: Quantized, v: Quantized, options: Options, rows: RowsPerScale) -> tuple[Plan, WorkList]:
    ready = planned(*kernel_calls.shapes(q, k, v), options, rows=rows)
    ready.require_ready()
    return ready, ready.plan.work


def _bound(
    ready: Plan, given: Mapping[str, Array], contents: MaskContents | None
) -> tuple[_Call, Callable[..., Array] | None]:
    """The function of arrays that lie as these, and the one that makes the lists of a call, where calls do."""
    work = ready.plan.work
    ready = without_mask(ready)  # a cached call holds no array of a mask
    if contents is None or not isinstance(work, WorkAtCall):
        return ready.bind(given, pins=True), None
    lists_of = gpu.lists_of_calls(ready.plan, work)
    return ready.bind({**given, AT_CALL: lists_of(*contents.arrays)}, pins=True), lists_of
