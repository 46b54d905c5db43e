"""The passes of a plan's kernels: which arrays each reads and writes, in which order, on whatever runs them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from . import checks, sm90_tiles
from .arrays import Array, ShapeDtype
from .params import Records, View
from .plans import Plan
from .source import KernelSpec
from .tensor_map import Template, Tiles
from .tiles import shared_bytes
from .work_list import WorkList


class Pass(NamedTuple):
    """The kernels of a pass in order, and beside inputs and results the arrays that they leave to each other: first
    those that start at multiples of 16 bytes, as all may lie in one."""

    entries: tuple[str, ...]
    workspaces: tuple[str, ...]
    zeros: tuple[str, ...] = ()  # if any, all workspaces, which hold zeros before the first kernel and after the last


FORWARD = (
    Pass(("forward", "combine"), ("o_parts", "lse_parts")),
    Pass(("forward",), ("next_tile",), ("next_tile",)),
    Pass(("scores", "softmax", "output"), ("scores",)),
)
BACKWARD = (
    Pass(("backward_statistics", "backward", "convert_dq"), ("dq_sum", "delta", "next_tile")),
    Pass(("backward_statistics", "backward", "backward_rows"), ("delta", "next_tile")),
    Pass(("backward_statistics", "backward"), ("dq_sum", "delta", "next_tile")),
    Pass(("backward_rows", "backward_columns"), ("delta",)),
    Pass(("scores", "gradient_scores", "gradient_queries", "gradient_keys"), ("scores", "score_gradients")),
)
_WRITES = {
    "sm80_backward_statistics": ("delta", "dq_sum"),
    "sm80_backward": ("dq_sum", "dk", "dv"),
    "sm80_convert_dq": ("dq",),
    "sm80_backward_rows": ("dq",),
    "sm80_forward": ("o", "lse"),
    "sm80_combine": ("o", "lse"),
    "sm90_forward": ("o", "lse"),
    "sm90_backward_statistics": ("delta", "dq_sum", "dq"),
    "sm90_backward": ("dq_sum", "dq", "dk", "dv"),
    "sm90_backward_wide": ("dq_sum", "dk", "dv"),
    "sm90_backward_rows": ("dq",),
    "sm90_convert_dq": ("dq",),
    "simt_forward": ("o", "lse"),
    "simt_backward_statistics": ("delta", "dq"),
    "simt_backward": ("dq", "dk", "dv"),
    "simt_backward_rows": ("dq", "delta"),
    "simt_backward_columns": ("dk", "dv"),
    "naive_scores": ("scores",),
    "naive_softmax": ("scores", "lse"),
    "naive_output": ("o",),
    "naive_gradient_scores": ("scores", "score_gradients"),
    "naive_gradient_queries": ("dq",),
    "naive_gradient_keys": ("dk", "dv"),
}


class Machine(Protocol):
    """What runs kernels: a GPU, or the simulator."""

    def address(self, array: Array) -> int:
        """Where an array's first element lies, as a kernel sees it."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory for what one pass leaves to the next."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """The same, holding zeros, as the kernels leave it."""

    def lists(self, work: WorkList) -> dict[str, Array]:
        """The arrays of a work list where kernels can read them."""

    def tensor_map(self, tiles: Tiles) -> Template:
        """How kernels copy tiles of arrays that lie alike."""

    def launch(self, spec: KernelSpec, grid: int, shared_bytes: int, arguments: tuple[Any, ...]) -> None:
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


def forward(plan: Plan, machine: Machine, q: Array, k: Array, v: Array, o: Array, lse: Array) -> list[Array]:
    """Write o [*batch, heads, seqlen_q, value_dim] and lse [*batch, heads, seqlen_q].

    What one kernel left to the next is returned, for whoever runs the kernels again.
    """
    return _run(plan, machine, of_plan(plan, FORWARD), {"q": q, "k": k, "v": v, "o": o, "lse": lse})


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
) -> list[Array]:
    """Write dq [*batch, heads, ...], dk and dv [*batch, kv_heads, ...], over the broadcast leading axes.

    What one kernel left to the next is returned, for whoever runs the kernels again.
    """
    arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do, "dq": dq, "dk": dk, "dv": dv}
    if dlse is not None:
        arrays["dlse"] = dlse
    return _run(plan, machine, of_plan(plan, BACKWARD), arrays)


def of_plan(plan: Plan, passes: tuple[Pass, ...]) -> Pass:
    """The first pass whose kernels a plan has."""
    return next(each for each in passes if set(each.entries) <= set(plan.specs))


def workspaces(plan: Plan, kernels: Pass) -> dict[str, ShapeDtype]:
    """What a pass's kernels leave to each other."""
    asks = any(plan.takes_tiles_on(plan.specs[entry]) for entry in kernels.entries)
    is_left = {"next_tile": asks, "dq_sum": plan.sums_dq}
    names = (name for name in kernels.workspaces if is_left.get(name, True))
    return {name: ShapeDtype(plan.workspace_shape(name), plan.problem.accumulator) for name in names}


def bound(plan: Plan, entries: tuple[str, ...], views: tuple[View, ...], machine: Machine) -> Bound:
    """The launches of passes over arrays that lie so."""
    known = _bound.setdefault(plan, {})
    found = known.get((type(machine), entries, views))
    if found is None:
        specs = [plan.specs[entry] for entry in entries]
        boxes = next((sm90_tiles.boxes(spec) for spec in specs if spec.takes_maps), {})
        records = Records.of(plan, views, boxes, machine.tensor_map)
        tiles = [plan.tiles_of_launch(spec, len(records.templates)) for spec in specs]
        launches = (Launch(spec, plan.blocks(spec, count), shared_bytes(spec)) for spec, count in zip(specs, tiles))
        found = Bound(records, tuple(launch for launch in launches if launch.grid))
        if len(known) >= _MOST_BOUND:
            known.clear()
        known[type(machine), entries, views] = found
    return found


_MOST_BOUND = 64  # ways for arrays to lie, of one plan
_bound: WeakKeyDictionary[Plan, dict[tuple[type, tuple[str, ...], tuple[View, ...]], Bound]] = WeakKeyDictionary()


def _run(plan: Plan, machine: Machine, kernels: Pass, arrays: dict[str, Array]) -> list[Array]:
    check, rooms = checks.current(), workspaces(plan, kernels)
    for name, room in rooms.items():
        if check is None:
            make = machine.zeros if name in kernels.zeros else machine.empty
            arrays[name] = make(room.shape, room.dtype)
            continue
        arrays[name] = check.empty(name, room.shape, room.dtype)
        if name in kernels.zeros:
            arrays[name].fill(0)
    views = tuple(View.of(name, array) for name, array in arrays.items())
    records, launches = bound(plan, kernels.entries, views, machine)
    lists = machine.lists(plan.work)
    if check is not None:
        checks.check_lists(plan.work, lists)
    filler = records.placed({name: machine.address(array) for name, array in lists.items()})
    filled = filler.filled([machine.address(array) for array in arrays.values()])
    for spec, grid, nbytes in launches:
        for arguments in filled.arguments(spec):
            machine.launch(spec, grid, nbytes, arguments)
        if check is not None:
            written = tuple(rooms) if spec.is_split else _WRITES[spec.name]
            check.after(spec.name, {name: arrays[name] for name in written if name in arrays})  # dq_sum may not be
    return [arrays[name] for name in rooms]
