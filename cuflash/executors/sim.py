"""The `sim` executor: a plan's kernels on the simulator, from the text that a GPU runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .. import sim
from ..arrays import Array
from ..blocks.work_list import WorkList
from ..compiler.source import source
from ..planning.launches import Launch, Workspace
from ..planning.plan import KernelPlan
from ..planning.spec import KernelSpec
from .arguments import KernelArguments
from .checks import Check
from .launch import Lists, run
from .tensor_map import Template, BoxedArray, simulated, template
from .workspaces import SeparateWorkspaces


@dataclass(frozen=True)
class Simulator:
    """The host, as what runs kernels; tests give it a hostile schedule or a sanitizer.

    Attributes
    ----------
    schedule : sim.Schedule
        In which order threads run and copies arrive.
    sanitize : "", "address", "undefined", "thread" or "blocks"
        As in `sim.build`.
    time_limit : float
        Seconds for each launch.
    """

    schedule: sim.Schedule = sim.Schedule()
    sanitize: sim.Sanitizer = ""
    time_limit: float = 60.0

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def set_zero(self, array: Array) -> None:
        array.fill(0)

    def stream(self) -> None:
        """The simulator has no streams: every launch ends before it returns."""

    def workspaces(self, needs: Mapping[str, Workspace]) -> SeparateWorkspaces:
        return SeparateWorkspaces(self.allocator(needs), self.address)

    def allocator(self, workspaces: Mapping[str, Workspace]) -> Callable[[Any], list[Array]]:
        """Every bit is set where a kernel must write before another reads: NaN, if it is a float."""
        return lambda stream: [_workspace(each) for each in workspaces.values()]

    def lists(self, work: WorkList) -> Lists:
        return Lists(work.lists)

    def tensor_map(self, tiles: BoxedArray) -> Template:
        return template(simulated, tiles)

    def launcher(self, spec: KernelSpec, grid: int, shared_bytes: int) -> Callable[[KernelArguments, Any], None]:
        return lambda arguments, stream: self.launch(
            spec, grid, shared_bytes, tuple(record[0] for record in arguments.records)
        )

    def launch(self, spec: KernelSpec, grid: int, shared_bytes: int, arguments: tuple[Any, ...]) -> None:
        """Run a kernel to its end."""
        kernel = _kernel(spec, self.sanitize)
        kernel((grid,), spec.num_threads, arguments, shared_bytes, self.schedule, time_limit=self.time_limit)

    def wait(self, launch: Launch) -> None:
        """Launches have ended already."""


def _workspace(workspace: Workspace) -> Array:
    fill = 0 if workspace.is_zeroed else 0xFF
    return np.full(workspace.nbytes, fill, np.uint8).view(workspace.dtype).reshape(workspace.shape)


@lru_cache(maxsize=256)
def _kernel(spec: KernelSpec, sanitize: sim.Sanitizer) -> sim.Kernel:
    return sim.build(source(spec, host=True), spec.name, sanitize=sanitize)


_SIMULATOR = Simulator()


def forward(
    plan: KernelPlan, arrays: Mapping[str, Array], check: Check | None = None, numbers: Sequence[int] = ()
) -> None:
    """Write o [*batch, heads, seqlen_q, value_dim] and lse [*batch, heads, seqlen_q]."""
    assert plan.kernels is not None
    run(plan, plan.kernels.forward, _SIMULATOR, arrays, check, numbers)


def backward(
    plan: KernelPlan, arrays: Mapping[str, Array], check: Check | None = None, numbers: Sequence[int] = ()
) -> None:
    """Write dq [*batch, heads, ...], dk and dv [*batch, kv_heads, ...], over the broadcast leading axes."""
    assert plan.kernels is not None
    run(plan, plan.kernels.backward, _SIMULATOR, arrays, check, numbers)
