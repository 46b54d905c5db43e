"""The `sim` executor: a plan's kernels on the simulator, from the text that a GPU runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from . import passes, sim
from .arrays import Array
from .plans import Plan
from .source import KernelSpec, source
from .tensor_map import Template, Tiles, simulated, template
from .work_list import WorkList


@dataclass(frozen=True)
class Simulator:
    """The host, as what runs kernels; tests give it a hostile schedule or a sanitizer.

    Attributes
    ----------
    schedule : sim.Schedule
        In which order threads run and copies arrive.
    sanitize : "", "address", "undefined" or "thread"
        As in `sim.build`.
    time_limit : float
        Seconds for each launch.
    """

    schedule: sim.Schedule = sim.Schedule()
    sanitize: sim.Sanitizer = ""
    time_limit: float = 60.0

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.full(shape, np.nan, dtype)  # whoever reads what nobody wrote shall notice

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.zeros(shape, dtype)

    def lists(self, work: WorkList) -> dict[str, Array]:
        return work.lists

    def tensor_map(self, tiles: Tiles) -> Template:
        return template(simulated, tiles)

    def launch(self, spec: KernelSpec, grid: int, shared_bytes: int, arguments: tuple[Any, ...]) -> None:
        kernel = _kernel(spec, self.sanitize)
        kernel((grid,), spec.num_threads, arguments, shared_bytes, self.schedule, time_limit=self.time_limit)


@lru_cache(maxsize=256)
def _kernel(spec: KernelSpec, sanitize: sim.Sanitizer) -> sim.Kernel:
    return sim.build(source(spec, host=True), spec.name, sanitize=sanitize)


_SIMULATOR = Simulator()


def forward(plan: Plan, q: Array, k: Array, v: Array, o: Array, lse: Array) -> None:
    """Write o [*batch, heads, seqlen_q, value_dim] and lse [*batch, heads, seqlen_q]."""
    passes.forward(plan, _SIMULATOR, q, k, v, o, lse)


def backward(
    plan: Plan,
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
    passes.backward(plan, _SIMULATOR, do, q, k, v, o, lse, dlse, dq, dk, dv)
