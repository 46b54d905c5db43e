"""Launches the kernels of a pass on a machine: the one way for GPUs and for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from ..arrays import Array
from ..blocks.work_list import WorkList
from ..planning.launches import Launch, Pass, Workspace
from ..planning.list_kernels import WorkAtCall
from ..planning.plan import KernelPlan
from ..planning.spec import KernelSpec
from .arguments import KernelArguments
from .checks import Check, check_lists
from .params import ParamsTemplate, View
from .tensor_map import Template, BoxedArray
from .workspaces import SeparateWorkspaces, Taken, Workspaces


class BoundCall(Protocol):
    """A pass on arrays of one layout: it takes them in order, and returns the results that it allocates."""

    def __call__(
        self, *arrays: Array, numbers: Sequence[int] = (), check: Check | None = None
    ) -> Sequence[Array]: ...


PACKET_BYTES = 16  # of a store of neighbouring elements


class Lists:
    """The arrays of a work list where kernels read them, by name; here they are ready at any time."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays

    def use(self, stream: Any) -> None:
        """Prepare the arrays for kernels that are launched on a stream."""


class LaunchTarget(Protocol):
    """A device that runs kernels: a GPU or the simulator."""

    def address(self, array: Array) -> int:
        """The address of an array's first element, as a kernel sees it."""

    def set_zero(self, array: Array) -> None:
        """Set an array to zeros, on the current stream."""

    def stream(self) -> Any:
        """The current stream, on which arrays are allocated."""

    def workspaces(self, needs: Mapping[str, Workspace]) -> SeparateWorkspaces | Workspaces:
        """The memory of the workspaces of a pass."""

    def allocator(self, workspaces: Mapping[str, Workspace]) -> Callable[[Any], list[Array]]:
        """A function that makes new arrays for workspaces on a stream, zeros where they must be zero."""

    def lists(self, work: WorkList) -> Lists:
        """The arrays of a work list, put where kernels can read them."""

    def tensor_map(self, tiles: BoxedArray) -> Template:
        """The tensor map, but for its address, of arrays of one layout."""

    def launcher(self, spec: KernelSpec, grid: int, shared_bytes: int) -> Callable[[KernelArguments, Any], None]:
        """A function (arguments, stream) that launches a kernel and leaves nothing that reads the arguments."""

    def wait(self, launch: Launch) -> None:
        """Wait until a launch has ended; raises RuntimeError where it failed."""


class Machine(LaunchTarget, Protocol):
    """A device that runs kernels on arrays of one library, for which passes are bound."""

    @property
    def executor(self) -> str:
        """The name of the executor."""

    @property
    def current_stream(self) -> Callable[[], Any]:
        """A function that returns the current stream."""

    @property
    def address(self) -> Callable[[Array], int]:
        """A function that returns the address of an array's first element."""

    def prepare(self, kernels: Pass) -> None:
        """Compile the kernels of a pass, if that saves time."""

    def maker(self, shape: tuple[int, ...], dtype: Any, axes: Sequence[int] | None = None) -> Callable[[], Array]:
        """Return a function that allocates an array, its axes in memory from the outermost inwards."""

    def layout(self, array: Array) -> Array:
        """Return an object with an array's shape, dtype, strides and address under CuPy's names."""

    def keep_captured(self, plan: KernelPlan, arrays: Iterable[Array], pins: bool) -> None:
        """Hold what a captured call allocated, and with `pins` its plan, since each replay writes there."""


class BoundPass:
    """The launches of a pass over arrays of one layout, complete but for the addresses of the arrays.

    Parameters
    ----------
    plan : KernelPlan
    kernels : Pass
    views : tuple of View
        The layouts of operands and results.
    target : Machine
    unwanted : dict of Workspace by name
        Results that no caller wants.
    """

    def __init__(
        self,
        plan: KernelPlan,
        kernels: Pass,
        views: tuple[View, ...],
        target: LaunchTarget,
        unwanted: Mapping[str, Workspace] = MappingProxyType({}),
    ) -> None:
        if any(launch.spec.fuses_dq_epilogue for launch in kernels.launches.values()):
            _require_whole_packets(views)
        needs = {**unwanted, **kernels.workspaces}
        made = tuple(View.of_new(name, workspace) for name, workspace in needs.items())
        records = ParamsTemplate.of(plan, (*views, *made), kernels.boxes, target.tensor_map, kernels.features)
        num_batch = plan.problem.mask_shape.num_batch // len(records.templates)
        self._plan, self._kernels, self._target, self._needs = plan, kernels, target, needs
        self._names = tuple(view.name for view in (*views, *made))
        self._lists = target.lists(plan.work)
        grids = [(launch, launch.grid(num_batch)) for launch in kernels.launches.values()]
        self.launches = tuple((launch, grid) for launch, grid in grids if grid)
        names = [feature.name for feature in kernels.features]
        self._arguments = records.with_lists(
            {name: target.address(array) for name, array in self._lists.arrays.items()},
            [
                (*range(1 + bool(launch.boxes)), *(2 + names.index(name) for name in launch.features))
                for launch, _ in self.launches
            ],
        )
        self._workspaces = target.workspaces(needs)
        self._zeroed = tuple(self._names.index(name) for name in kernels.zeroed)
        self._launchers = [
            (number, launch, target.launcher(launch.spec, grid, launch.shared_bytes))
            for number, (launch, grid) in enumerate(self.launches)
        ]

    def __call__(
        self, arrays: Sequence[Array], stream: Any, check: Check | None = None, numbers: Sequence[int] = ()
    ) -> list[Array]:
        """Launch the kernels on arrays in the order of the views; returns what holds the workspaces, for a capture."""
        for i in self._zeroed:
            self._target.set_zero(arrays[i])
        addresses = list(map(self._target.address, arrays))
        if check is None:
            return self.launch(addresses, stream, numbers)
        return self._checked(arrays, addresses, stream, check, numbers)

    @property
    def sets_zeros(self) -> bool:
        """Return whether results must be set to zero before the kernels, which `launch` does not do."""
        return bool(self._zeroed)

    def launch(self, addresses: list[int], stream: Any, numbers: Sequence[int] = ()) -> list[Array]:
        """Launch the kernels on arrays at these addresses; returns what holds the workspaces, for a capture."""
        taken = self._workspaces.take(stream)
        self._lists.use(stream)
        addresses += taken.addresses
        addresses += numbers
        buffers = [arguments.take(addresses) for arguments in self._arguments]
        for number, _, start in self._launchers:
            for buffer in buffers:
                start(buffer.kernels[number], stream)
        for arguments, buffer in zip(self._arguments, buffers):
            arguments.give_back(buffer)
        self._workspaces.give_back(stream, taken)
        return taken.arrays

    def _checked(
        self, arrays: Sequence[Array], addresses: list[int], stream: Any, check: Check, numbers: Sequence[int]
    ) -> list[Array]:
        """Launch the kernels one by one, wait for each, and check the arrays that it wrote."""
        taken = self._checked_workspaces(check)
        self._lists.use(stream)
        buffers = [arguments.take([*addresses, *taken.addresses, *numbers]) for arguments in self._arguments]
        named = dict(zip(self._names, [*arrays, *taken.arrays]))
        for number, launch, start in self._launchers:
            for buffer in buffers:
                start(buffer.kernels[number], stream)
            self._target.wait(launch)
            check.after(launch.spec.name, {name: named[name] for name in launch.writes if name in named})
        return taken.arrays

    def _checked_workspaces(self, check: Check) -> Taken:
        if not isinstance(self._plan.work, WorkAtCall):
            check_lists(self._plan.work, self._lists.arrays)
        made = []
        for name, workspace in self._needs.items():
            made.append(check.empty(name, workspace.shape, workspace.dtype))
            if workspace.is_zeroed:
                made[-1].fill(0)
        return Taken(list(map(self._target.address, made)), made)


def _require_whole_packets(views: tuple[View, ...]) -> None:
    """Refuse a dQ whose rows do not start at multiples of 16 bytes, which kernels that finish dQ store at a time.

    Raises
    ------
    ValueError
        A stride of dq is no such multiple. The library's own results never are so.
    """
    for view in views:
        if view.name == "dq" and any(step % PACKET_BYTES for step in view.strides[:-1]):
            raise ValueError(f"dq's rows must start at multiples of {PACKET_BYTES} bytes; got strides {view.strides}")


def run(
    plan: KernelPlan,
    kernels: Pass,
    target: LaunchTarget,
    arrays: Mapping[str, Array],
    check: Check | None = None,
    numbers: Sequence[int] = (),
) -> list[Array]:
    """Launch a pass once on operands and results by name; returns what holds its workspaces."""
    views = tuple(View.of(name, array) for name, array in arrays.items())
    bound = BoundPass(plan, kernels, views, target)
    return bound(list(arrays.values()), target.stream(), check, numbers)
