"""The `sim` executor: a plan's kernels on the simulator, built from the source that a GPU runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike

from .. import sim
from ..arrays import Array
from ..blocks.work_list import WorkList
from ..compiler.source import source
from ..planning.launches import Launch, Pass, Workspace
from ..planning.plan import KernelPlan
from ..planning.spec import KernelSpec
from . import gpu
from .arguments import KernelArguments
from .checks import Check
from .launch import BoundCall, Lists, PassLayout
from .tensor_map import Template, BoxedArray, simulated, template
from .workspaces import SeparateWorkspaces, Stream


class _NoStream:
    """The stream of a machine on which each launch ends before the next one starts."""

    ptr = 0

    def is_capturing(self) -> bool:
        return False


_NO_STREAM = _NoStream()


@dataclass(frozen=True)
class Simulator:
    """The host as a machine that runs kernels; tests set an adversarial schedule or a sanitizer.

    Attributes
    ----------
    schedule : sim.Schedule
        The order in which threads run and copies arrive.
    sanitize : "", "address", "undefined", "thread" or "blocks"
        As in `sim.build`.
    time_limit : float
        Time limit of each launch in seconds.
    """

    executor: ClassVar[str] = "sim"
    device: ClassVar[int] = 0
    schedule: sim.Schedule = sim.Schedule()
    sanitize: sim.Sanitizer = ""
    time_limit: float = 60.0

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def set_zero(self, array: Array) -> None:
        array.fill(0)

    def stream(self) -> _NoStream:
        """Return the stream of all launches; each launch has ended when it returns."""
        return _NO_STREAM

    def prepare(self, kernels: Pass, *later: Pass) -> None:
        """Skip compilation: a kernel is compiled when it is launched."""

    def maker(self, shape: tuple[int, ...], dtype: DTypeLike, axes: Sequence[int] | None = None) -> Callable[[], Array]:
        """Return a function that allocates an array."""
        assert axes is None, "results of the simulator are in C order"
        return partial(_workspace, Workspace(shape, np.dtype(dtype)))

    def layout(self, array: Array) -> Array:
        return array

    def keep_captured(self, plan: KernelPlan, arrays: Iterable[Array], pins: bool) -> None:
        """Keep nothing: the simulator has no captures."""

    def workspaces(self, needs: Mapping[str, Workspace]) -> SeparateWorkspaces:
        return SeparateWorkspaces(needs, _workspace, self.address)

    def lists(self, work: WorkList) -> Lists:
        return Lists(work.lists)

    def tensor_map(self, tiles: BoxedArray) -> Template:
        return template(simulated, tiles)

    def launcher(self, spec: KernelSpec, grid: int, shared_bytes: int) -> Callable[[KernelArguments, Stream], None]:
        return lambda arguments, stream: self.launch(
            spec, grid, shared_bytes, tuple(record[0] for record in arguments.records)
        )

    def launch(self, spec: KernelSpec, grid: int, shared_bytes: int, arguments: tuple[Any, ...]) -> None:
        """Run a kernel, and return when it has ended."""
        kernel = partial(_kernel(spec, self.sanitize), time_limit=self.time_limit, flushes=spec.dtype != np.float64)
        kernel((grid,), spec.num_threads, arguments, shared_bytes, self.schedule)

    def wait(self, launch: Launch) -> None:
        """Return immediately: launches have already ended."""


def _workspace(workspace: Workspace) -> Array:
    """Return an array of zeros if kernels need them; otherwise set all bits (NaN), to reveal reads before writes."""
    array = np.empty(workspace.shape, workspace.dtype)
    array.reshape(-1).view(np.uint8)[...] = 0 if workspace.is_zeroed else 0xFF
    return array


@lru_cache(maxsize=256)
def _kernel(spec: KernelSpec, sanitize: sim.Sanitizer) -> sim.Kernel:
    return sim.build(source(spec, host=True), spec.name, sanitize=sanitize)


_SIMULATOR = Simulator()


def bind(plan: KernelPlan, of: PassLayout) -> BoundCall:
    """Return the function that runs a pass on the simulator, as `gpu.bind` does on a GPU.

    The pass is bound once for each simulator, since tests replace `_SIMULATOR`.
    """
    bound: dict[Simulator, BoundCall] = {}

    def call(*arrays: Array, numbers: Sequence[int] = (), check: Check | None = None) -> Sequence[Array]:
        machine = _SIMULATOR
        if machine not in bound:
            bound[machine] = gpu.bind(plan, of, machine)
        return bound[machine](*arrays, numbers=numbers, check=check)

    return call
