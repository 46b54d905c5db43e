"""Plans of masks whose blocks, or row intervals, kernels list on the device, once per plan.

All masks of one layout (shapes and dtypes) share the launches of one plan; each has lists of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..arrays import Array, ShapeDtype
from ..blocks.index import BlockIndex
from ..blocks.index_mask import IndexMask
from ..executors._layout_key import layout_key
from ..executors import gpu
from ..masks.base import Band
from ..masks.one_array import at_each_call
from ..planning.dropout_launches import numbers_of
from ..planning.interval_kernels import IntervalsAtCall
from ..planning.list_kernels import AT_CALL, WorkAtCall, list_results
from ..planning._call_cache import CALLS
from ..planning.lookup import lookup
from ..planning.options import Options
from ..plans import BoundCall, Gradients, Plan

_OF_INDEX = {"indptr": "row_pointers", "indices": "kv_blocks", "kinds": "kinds", "tiles": "tiles", "bits": "bits"}


@dataclass(frozen=True, eq=False)
class ListedPlan(Plan):
    """A plan whose calls read lists, or row intervals, that kernels made on the device when the plan was made.

    Parameters
    ----------
    shared : Plan
        The plan that binds the launches, for all masks of one layout.
    guard : object, optional
        Makes other streams wait for the lists before they read them, and the memory of the lists wait for those
        streams before it is freed.
    """

    shared: Plan | None = field(default=None, repr=False)
    guard: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, shared: Plan, lists: Array, captured: dict[str, Array], numbers: tuple[int, ...]) -> ListedPlan:
        """Return the plan of a mask with these lists, or row intervals; `shared` is the plan of its layout."""
        work = shared.plan.work
        assert isinstance(work, WorkAtCall)
        if isinstance(work, IntervalsAtCall):
            plan = replace(shared.plan, work=work.with_intervals(lists))
        else:
            found = list_results(lists, work.source, tuple(_OF_INDEX.values()))
            index: BlockIndex = replace(work.index, **{name: found[of_list] for name, of_list in _OF_INDEX.items()})
            plan = replace(shared.plan, mask=IndexMask(index), work=replace(work, index=index))
        made = cls(plan, shared.executor, {**captured, AT_CALL: lists}, numbers, shared)
        object.__setattr__(made, "_owner", shared._owner)
        object.__setattr__(made, "guard", gpu.current_target().guarded(made, {AT_CALL: lists}))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "guard": None}

    def forward(self, q: Array, k: Array, v: Array, out: Any = None, **operands: Array) -> tuple[Array, Array]:
        self._wait_for_lists()
        return super().forward(q, k, v, out, **operands)

    def backward(
        self, do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, dlse: Array | None = None,
        **operands: Array,
    ) -> Gradients:  # fmt: skip
        self._wait_for_lists()
        return super().backward(do, q, k, v, o, lse, dlse, **operands)

    def bind(self, given: Mapping[str, Array], *, pins: bool = False, wants_lse: bool = True) -> BoundCall:
        assert self.shared is not None
        return self.shared.bind(given, pins=pins, wants_lse=wants_lse)

    def bind_into(
        self, given: Mapping[str, Array], outs: Mapping[str, Array], *, wants_lse: bool = True, pins: bool = True
    ) -> Callable[..., Sequence[Array] | None]:
        assert self.shared is not None
        return self.shared.bind_into(given, outs, wants_lse=wants_lse, pins=pins)

    def bind_backward(self, given: Mapping[str, Array], results: Mapping[str, ShapeDtype]) -> BoundCall:
        assert self.shared is not None
        return self.shared.bind_backward(given, results)

    def _wait_for_lists(self) -> None:
        if self.guard is not None:
            self.guard.use(gpu.current_target().stream())


def listed_plan(given: Mapping[str, Any], options: Options, planned: Callable[..., Plan]) -> ListedPlan | None:
    """Return a plan with lists that kernels make, for a mask of one array or of sequences on the GPU; else None.

    Parameters
    ----------
    given : dict by name
        q, k, v and further arrays of the call, NumPy's or CuPy's, or their shapes and dtypes.
    options : Options
        The arguments of the call, its score in one piece.
    planned : callable (q, k, v, options) -> Plan
        Plans a call of a layout that has no shared plan yet.
    """
    looked_up = lookup(options, layout_key)
    q, k, v, *_ = given.values()
    operands = {name: array for name, array in given.items() if name not in ("q", "k", "v")}
    key = looked_up.key("plan", layout_key(*given.values()), *operands)
    contents = looked_up.contents
    if contents is None or key is None:
        return None
    shared_call = CALLS.get(key)  # a plan that binds the launches of a layout, and the function that makes its lists
    if shared_call is None:
        shared = planned(q, k, v, options._replace(mask=at_each_call(options.mask)))
        work = shared.plan.work
        if not isinstance(work, WorkAtCall) or not shared.can_bind:
            return None
        shared = replace(without_mask(shared), captured={})
        shared_call = shared, gpu.lists_of_calls(shared.plan, work)
        CALLS.put(key, shared_call)
    shared, lists_of = shared_call
    captured = {name: array for name, array in operands.items() if name != "sink"}
    return ListedPlan.of(shared, lists_of(*contents.arrays), captured, numbers_of(options.dropout))


def without_mask(ready: Plan) -> Plan:
    """Return `ready` without the mask that it was made with, which its calls do not read."""
    return replace(ready, plan=replace(ready.plan, mask=Band()))
