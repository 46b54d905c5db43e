"""The passes of a plan's kernels: which arrays each reads and writes, in which order, on whatever runs them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

from .arrays import Array
from .params import Records, View
from .plans import Plan
from .source import KernelSpec
from .tiles import shared_bytes
from .work_list import WorkList


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


def forward(plan: Plan, machine: Machine, q: Array, k: Array, v: Array, o: Array, lse: Array) -> None:
    """Write o [*batch, heads, seqlen_q, value_dim] and lse [*batch, heads, seqlen_q]."""
    _run(plan, machine, ("forward",), {"q": q, "k": k, "v": v, "o": o, "lse": lse})


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
) -> None:
    """Write dq [*batch, heads, ...], dk and dv [*batch, kv_heads, ...], over the broadcast leading axes."""
    delta = machine.empty(plan.problem.lse_shape(), plan.problem.accumulator)
    arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do, "dq": dq, "dk": dk, "dv": dv, "delta": delta}
    if dlse is not None:
        arrays["dlse"] = dlse
    _run(plan, machine, ("backward_rows", "backward_columns"), arrays)


def _run(plan: Plan, machine: Machine, entries: tuple[str, ...], arrays: dict[str, Array]) -> None:
    views = tuple(View(name, array.dtype, array.shape, array.strides) for name, array in arrays.items())
    records = _records(plan, views)
    addresses = {name: machine.address(array) for name, array in (arrays | machine.lists(plan.work)).items()}
    params = records.at(addresses)
    for entry in entries:
        spec = plan.specs[entry]
        num_blocks = plan.grid(spec)
        if num_blocks == 0:  # and with no batch entry perhaps no record
            continue
        for record in params:
            machine.launch(spec, num_blocks // len(params), shared_bytes(spec), record)


@lru_cache(maxsize=256)
def _records(plan: Plan, views: tuple[View, ...]) -> Records:
    return Records.of(plan, views)
