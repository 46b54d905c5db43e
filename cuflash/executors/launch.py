"""Launching the kernels of a pass on a machine: the same code serves GPUs and the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple, Protocol

from numpy.typing import DTypeLike

from ..arrays import Array, ShapeDtype
from ..blocks.work_list import WorkList
from ..planning.launches import Launch, Pass, Workspace
from ..planning.list_kernels import WorkAtCall
from ..planning.plan import KernelPlan
from ..planning.spec import KernelSpec
from . import checks
from ._records import LaunchRecord, View, arguments_of
from .arguments import Arguments, KernelArguments
from .checks import Check, check_lists
from .params import attention_record
from .tensor_map import Template, BoxedArray
from .workspaces import SeparateWorkspaces, Stream, Workspaces


class PassLayout(NamedTuple):
    """The arrays of a pass of a plan; a pass is bound to their layouts.

    Attributes
    ----------
    name : str
        The pass.
    inputs : dict of arrays by name
        Operands whose layouts later calls share. Objects with only a layout suffice on a GPU.
    results : dict of ShapeDtype by name
        Results, which each call allocates.
    unwanted : dict of ShapeDtype by name
        Results that the caller does not want; they are workspaces of the kernels.
    axes : dict of sequences of int by name
        The order of a result's axes in memory, outermost first, if it is not C order.
    pins : bool
        If True, memory that a captured call uses is held forever, because the caller does not hold the plan.
    """

    name: str
    inputs: Mapping[str, Array]
    results: Mapping[str, ShapeDtype]
    unwanted: Mapping[str, ShapeDtype] = MappingProxyType({})
    axes: Mapping[str, Sequence[int]] = MappingProxyType({})
    pins: bool = False


class BoundCall(Protocol):
    """A pass bound to arrays of one layout: it takes the arrays in order, and returns the results that it allocates."""

    def __call__(
        self, *arrays: Array, numbers: Sequence[int] = (), check: Check | None = None
    ) -> Sequence[Array]: ...


PACKET_BYTES = 16  # bytes that one store of neighboring elements writes


class Lists:
    """The arrays of a work list by name, in memory that kernels can read; in this class, they are always ready."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays

    def use(self, stream: Stream) -> None:
        """Prepare the arrays for kernels to be launched on a stream."""


class LaunchTarget(Protocol):
    """A device that runs kernels, a GPU or the simulator, with the arrays of one library."""

    @property
    def executor(self) -> str:
        """The name of the executor."""

    @property
    def address(self) -> Callable[[Array], int]:
        """A function that returns the address of an array's first element, as a kernel sees it."""

    def set_zero(self, array: Array) -> None:
        """Set an array to zeros on the current stream."""

    @property
    def stream(self) -> Callable[[], Stream]:
        """A function that returns the current stream, on which arrays are allocated."""

    def prepare(self, kernels: Pass, *later: Pass) -> None:
        """Compile the kernels of a pass, and with them those of passes that follow, if that saves time."""

    def layout(self, array: Array) -> Array:
        """Return an object with an array's shape, dtype, strides and address under CuPy's names."""

    def keep_captured(self, plan: KernelPlan, arrays: Iterable[Array], pins: bool) -> None:
        """Keep the arrays that a captured call allocated, and with `pins` its plan, since each replay uses them."""

    def workspaces(self, needs: Mapping[str, Workspace]) -> SeparateWorkspaces | Workspaces:
        """Return the memory of the workspaces of a pass."""

    def maker(self, shape: tuple[int, ...], dtype: DTypeLike, axes: Sequence[int] | None = None) -> Callable[[], Array]:
        """Return a function that allocates an array; `axes` is the order of its axes in memory, outermost first."""

    def lists(self, work: WorkList) -> Lists:
        """Return the arrays of a work list, in memory that kernels can read."""

    def tensor_map(self, tiles: BoxedArray) -> Template:
        """Return the tensor map of arrays of one layout, without the address."""

    def launcher(self, spec: KernelSpec, grid: int, shared_bytes: int) -> Callable[[KernelArguments, Stream], None]:
        """Return a function (arguments, stream) that launches a kernel; it does not use the arguments later."""

    def wait(self, launch: Launch) -> None:
        """Wait until a launch has ended; raise RuntimeError if it failed."""


class BoundPass:
    """The launches of a record on a machine; a call only adds the addresses of arrays.

    Attributes
    ----------
    record : LaunchRecord
    works : sequence of WorkList
    lists : dict of arrays by name
        The arrays of the works, in memory that kernels can read.

    Parameters
    ----------
    record : LaunchRecord
    target : LaunchTarget
        The device that runs the kernels; they are compiled immediately.
    works : sequence of WorkList
        The work lists whose arrays the kernels read.
    """

    def __init__(self, record: LaunchRecord, target: LaunchTarget, works: Sequence[WorkList] = ()) -> None:
        self.record, self.works, self._target = record, works, target
        every = [lists for lists in map(target.lists, works) if lists.arrays]
        self.lists = {name: array for lists in every for name, array in lists.arrays.items()}
        self._uses = [lists.use for lists in every]
        self._arguments = Arguments(record.words, [kernel.arguments for kernel in record.kernels], record.places)
        self._workspaces = target.workspaces(record.workspaces) if record.workspaces else None
        self._starts = [
            target.launcher(launch.spec, grid, launch.shared_bytes) for launch, grid, _ in record.kernels
        ]

    @classmethod
    def of_plan(
        cls, plan: KernelPlan, kernels: Pass, views: Sequence[View], target: LaunchTarget,
        unwanted: Mapping[str, Workspace] = MappingProxyType({}),
    ) -> BoundPass:  # fmt: skip
        """Build the launches of a pass of attention over arrays of one layout.

        Parameters
        ----------
        views : sequence of View
            The layouts of operands and results.
        unwanted : dict of Workspace by name
            Results that the caller does not need.
        """
        if any(launch.spec.finishes_dq for launch in kernels.launches.values()):
            _require_whole_packets(views)
        lists = {name: target.address(array) for name, array in target.lists(plan.work).arrays.items()}
        return cls(attention_record(plan, kernels, views, target.tensor_map, lists, unwanted), target, [plan.work])

    @classmethod
    def of(
        cls, kernels: Pass, arrays: Mapping[str, Array | None], names: Sequence[str], target: LaunchTarget,
        work: WorkList | None = None,
    ) -> BoundPass:  # fmt: skip
        """Build the launches of a pass; parameters as for `pass_record`."""
        return cls(pass_record(kernels, arrays, names, target, work), target, [] if work is None else [work])

    def __call__(
        self, arrays: Sequence[Array], stream: Stream, check: Check | None = None, numbers: Sequence[int] = ()
    ) -> list[Array]:
        """Launch the kernels on arrays in the order of the names; return the workspaces, which a capture keeps."""
        for i, _ in self.record.zeroed:
            self._target.set_zero(arrays[i])
        addresses = [*map(self._target.address, arrays), *numbers]
        return self.launch(addresses, stream) if check is None else self._checked(arrays, addresses, stream, check)

    def launch(self, addresses: Sequence[int], stream: Stream) -> list[Array]:
        """Launch the kernels on arrays at these addresses, followed by numbers, without setting results to zero.

        Return the workspace arrays, which a capture must keep alive.
        """
        workspaces = self._workspaces
        if workspaces is not None:
            taken = workspaces.take(stream)
            addresses = [*addresses, *taken.addresses]
        for use in self._uses:
            use(stream)
        buffer = self._arguments.take(addresses)
        for start, arguments in zip(self._starts, buffer.kernels):
            start(arguments, stream)
        self._arguments.give_back(buffer)
        if workspaces is None:
            return []
        workspaces.give_back(stream, taken)
        return taken.arrays

    def wait(self) -> None:
        """Wait until all launches have ended; raise RuntimeError if one failed."""
        self._target.wait(self.record.kernels[-1].launch)

    def _checked(
        self, arrays: Sequence[Array], addresses: Sequence[int], stream: Stream, check: Check
    ) -> list[Array]:
        """Launch the kernels one at a time, wait for each, and check the arrays that it wrote."""
        for work in self.works:
            if not isinstance(work, WorkAtCall):
                check_lists(work, self.lists)
        for use in self._uses:
            use(stream)
        workspaces = {name: check.workspace(name, each) for name, each in self.record.workspaces.items()}
        buffer = self._arguments.take([*addresses, *map(self._target.address, workspaces.values())])
        named = {**dict(zip(self.record.names, arrays)), **workspaces}
        kernels = zip(self.record.kernels, self._starts, buffer.kernels)
        for launch, parts in groupby(kernels, key=lambda each: each[0].launch):
            for _, start, arguments in parts:
                start(arguments, stream)
            self._target.wait(launch)
            check.after(launch.spec.name, {name: named[name] for name in launch.writes if name in named})
        return list(workspaces.values())


def pass_record(
    kernels: Pass, arrays: Mapping[str, Array | None], names: Sequence[str], target: LaunchTarget,
    work: WorkList | None = None,
) -> LaunchRecord:  # fmt: skip
    """Return the launches of a pass whose records are described by its features.

    Parameters
    ----------
    arrays : dict by name
        The arrays whose layouts or addresses the records hold; None for those that the kernels do not use.
    names : sequence of str
        The arrays, or workspaces, whose addresses each call supplies, in this order.
    target : LaunchTarget
        The device of the arrays.
    work : WorkList, optional
        A work list whose arrays the kernels read, too.
    """
    views = {name: View.of(name, array) for name, array in arrays.items() if array is not None}
    held = {name: arrays[name] for name in views if name not in names}
    held |= {} if work is None else target.lists(work).arrays
    fixed = {name: target.address(array) for name, array in held.items()}
    views |= {name: View.of_new(name, each) for name, each in kernels.workspaces.items() if name not in views}
    workspaces = {name: each for name, each in kernels.workspaces.items() if name not in {*names, *fixed}}
    arguments = arguments_of(kernels.features, views, target.tensor_map)
    return LaunchRecord.of(kernels, [arguments], names, views, workspaces, fixed)


def _require_whole_packets(views: Sequence[View]) -> None:
    """Refuse a dQ whose rows do not start at multiples of 16 bytes, the size of one store of kernels that finish dQ.

    Raises
    ------
    ValueError
        A stride of dq is not a multiple of 16 bytes. Arrays that the library allocates always comply.
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
    """Launch a pass once on operands and results by name; return its workspace arrays."""
    views = tuple(View.of(name, array) for name, array in arrays.items())
    bound = BoundPass.of_plan(plan, kernels, views, target)
    return bound(list(arrays.values()), target.stream(), check, numbers)


def run_alone(kernels: Pass, arrays: Mapping[str, Array | None], target: LaunchTarget) -> None:
    """Launch a pass once on arrays by name, as `BoundPass.of` takes them."""
    bound = BoundPass.of(kernels, arrays, (), target)
    bound.launch((), target.stream())
    if checks.is_on():
        bound.wait()
