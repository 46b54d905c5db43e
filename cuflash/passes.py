"""The passes of a plan's kernels: which arrays each reads and writes, in which order, on whatever runs them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from . import checks
from .arrays import Array
from .params import Records, View
from .plans import Plan
from .source import KernelSpec
from .tiles import shared_bytes
from .work_list import WorkList

FORWARD = ("forward",)
BACKWARD = ("backward_rows", "backward_columns")
_WRITES = {"forward": ("o", "lse"), "backward_rows": ("dq", "delta"), "backward_columns": ("dk", "dv")}


class Machine(Protocol):
    """What runs kernels: a GPU, or the simulator."""

    def address(self, array: Array) -> int:
        """Where an array's first element lies, as a kernel sees it."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory for what one pass leaves to the next."""

    def lists(self, work: WorkList) -> dict[str, Array]:
        """The arrays of a work list where kernels can read them."""

    def launch(self, spec: KernelSpec, grid: int, shared_bytes: int, params: Any) -> None:
        """Run a kernel on `grid` blocks; it may still be running when this returns."""


class Launch(NamedTuple):
    """One kernel of a pass, over every record of it."""

    spec: KernelSpec
    grid: int
    shared_bytes: int


class Bound(NamedTuple):
    """Passes over a plan and arrays that lie in one way: everything about their launches but addresses."""

    records: Records
    launches: tuple[Launch, ...]


def forward(plan: Plan, machine: Machine, q: Array, k: Array, v: Array, o: Array, lse: Array) -> None:
    """Write o [*batch, heads, seqlen_q, value_dim] and lse [*batch, heads, seqlen_q]."""
    _run(plan, machine, FORWARD, {"q": q, "k": k, "v": v, "o": o, "lse": lse})


def backward(
    plan: Plan,
    machine: Machine,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    dlse: Array | None,
    dq: Array,
    dk: Array,
    dv: Array,
) -> Array:
    """Write dq [*batch, heads, ...], dk and dv [*batch, kv_heads, ...], over the broadcast leading axes.

    What one kernel left to the next is returned, for whoever runs the kernels again.
    """
    check, shape, dtype = checks.current(), plan.problem.lse_shape(), plan.problem.accumulator
    delta = machine.empty(shape, dtype) if check is None else check.empty("delta", shape, dtype)
    arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do, "dq": dq, "dk": dk, "dv": dv, "delta": delta}
    if dlse is not None:
        arrays["dlse"] = dlse
    _run(plan, machine, BACKWARD, arrays)
    return delta


def bound(plan: Plan, entries: tuple[str, ...], arrays: dict[str, Array]) -> Bound:
    """The launches of passes over arrays that lie as these do."""
    views = tuple(View(name, array.dtype, array.shape, array.strides) for name, array in arrays.items())
    known = _bound.setdefault(plan, {})
    found = known.get((entries, views))
    if found is None:
        records = Records.of(plan, views)
        specs = [plan.specs[entry] for entry in entries]
        launches = (Launch(spec, plan.grid(spec) // len(records.templates), shared_bytes(spec)) for spec in specs)
        found = Bound(records, tuple(launch for launch in launches if launch.grid))
        if len(known) >= _MOST_BOUND:
            known.clear()
        known[entries, views] = found
    return found


_MOST_BOUND = 64  # ways for arrays to lie, of one plan
_bound: WeakKeyDictionary[Plan, dict[tuple[tuple[str, ...], tuple[View, ...]], Bound]] = WeakKeyDictionary()


def _run(plan: Plan, machine: Machine, entries: tuple[str, ...], arrays: dict[str, Array]) -> None:
    records, launches = bound(plan, entries, arrays)
    lists, check = machine.lists(plan.work), checks.current()
    if check is not None:
        checks.check_lists(plan.work, lists)
    filler = records.placed({name: machine.address(array) for name, array in lists.items()})
    params = filler.filled(*(machine.address(array) for array in arrays.values()))
    for spec, grid, nbytes in launches:
        for record in params:
            machine.launch(spec, grid, nbytes, record)
        if check is not None:
            written = {name: arrays[name] for name in _WRITES[spec.entry]}
            check.after(spec.name, written)
