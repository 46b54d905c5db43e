"""Selector kernels launched on the current CUDA device, without waiting."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, namespace
from ..blocks.index import BlockIndex
from ..blocks.work_list import WorkList
from ..compiler import nvrtc
from ..masks import ChosenBlocks
from ..planning._call_cache import CALLS
from ..planning.launches import Pass, Workspace
from ..planning.list_kernels import AT_CALL
from ..planning.selection_kernels import ChoiceRule, drawing
from . import gpu
from ._records import LaunchRecord
from .index_maker import IndexMaker
from .launch import BoundPass, pass_record, run_alone
from .sim import Simulator

Step = tuple[Pass | BoundPass, Mapping[str, str]]


def chosen(
    rule: ChoiceRule, scores: Array, shares: Array | None, allowed: Array | None = None, forced: Array | None = None
) -> Array:
    """Choose blocks in each row of a grid with the kernel.

    Parameters
    ----------
    rule : ChoiceRule
    scores : CuPy array [..., rows, columns]
        Float32 or float64.
    shares : CuPy array of that shape and dtype, optional
        The amounts that count toward the rule's mass; default: each block counts equally.
    allowed, forced : CuPy bool arrays that broadcast against the scores, optional
        Blocks that may be kept, and blocks that must be kept if allowed, in addition to those that the rule names.

    Returns
    -------
    CuPy bool array of the scores' shape

    Raises
    ------
    RuntimeError
        The stream is captured, and the kernel is not compiled yet.
    """
    xp = namespace(scores)
    if 0 in scores.shape:
        return xp.zeros(scores.shape, bool)
    target = gpu.current_target()

    def make() -> BoundPass:
        kernels = rule.kernels(scores.shape, scores.dtype, gpu.current_device().tile_memory_bytes)
        return bound_kernel(kernels, target, ("scores", "shares", "allowed", "forced", "kept"))

    key = "choose", nvrtc.current_device()[1], rule, scores.shape, scores.dtype
    chooser: BoundPass = CALLS.get_or_make(key, make)
    inputs = [xp.ascontiguousarray(scores), None if shares is None else xp.ascontiguousarray(shares)]
    for each in (allowed, forced):
        inputs.append(None if each is None else xp.ascontiguousarray(xp.broadcast_to(each, scores.shape)))
    result = xp.empty(scores.shape, bool)
    chooser.launch([0 if each is None else target.address(each) for each in (*inputs, result)], target.stream())
    return result


def launched(kernels: Pass, arrays: Mapping[str, Array], key: Hashable, executor: str) -> None:
    """Launch a kernel on arrays, on the current device or, with executor="sim", in the simulator.

    Parameters
    ----------
    kernels : Pass
        A pass with one launch.
    arrays : dict of arrays by name
        The arrays that the kernel reads and writes.
    key : hashable
        A key that is equal for equal kernels on arrays of equal layouts.
    executor : str
        The name of the executor.
    """
    if executor == "sim":
        run_alone(kernels, arrays, Simulator())
        return
    target = gpu.current_target()
    key = "launched", nvrtc.current_device()[1], key
    bound: BoundPass = CALLS.get_or_make(key, partial(bound_kernel, kernels, target))
    bound.launch([target.address(arrays[name]) for name in arrays_of(kernels)], target.stream())


def bound_kernel(kernels: Pass, target: gpu.Gpu, names: Sequence[str] = ()) -> BoundPass:
    """Compile a kernel and return its launch, which takes the addresses of the arrays that it reads and writes.

    Parameters
    ----------
    kernels : Pass
        A pass with one launch.
    target : Gpu
    names : sequence of str, optional
        The arrays whose addresses the kernel takes; default: first those that it reads, then those that it writes.
    """
    gpu.compile_kernels(kernels.specs.values(), target)
    return BoundPass.of(kernels, {}, names or arrays_of(kernels), target)


def arrays_of(kernels: Pass) -> tuple[str, ...]:
    """Return the arrays of a pass with one launch: first those that it reads, then those that it writes."""
    (launch,) = kernels.launches.values()
    return (*launch.reads, *launch.writes)


def drawn(shape: tuple[int, ...], seed: int) -> Array:
    """Draw random scores for the blocks of a grid with the kernel, on the current device."""
    target = gpu.current_target()
    numbers = gpu.namespace().empty(shape, np.float32)
    bound_kernel(drawing(shape, seed), target).launch((target.address(numbers),), target.stream())
    return numbers


class Lists(NamedTuple):
    """The array of lists that each call of a selection allocates, and its conversion to the call's result.

    Attributes
    ----------
    steps : sequence of (BoundPass, dict of str by name)
        The kernels that write the array from "kept"; none if the kernels of the selection write it.
    allocate : callable
        Returns the array.
    result_of : callable
        Returns the result of a call from the array.
    """

    steps: Sequence[Step]
    allocate: Callable[[], Array]
    result_of: Callable[[Array], Any]

    @classmethod
    def of_index(cls, make_index: IndexMaker) -> Lists:
        """Return the lists of a block index."""
        lists = make_index.lists
        return cls(((lists.launches, {"mask": "kept"}),), lists.allocate, make_index.index_of)

    @classmethod
    def of_queries(cls, shape: tuple[int, ...], block: int, target: gpu.Gpu) -> Lists:
        """Return the lists [..., length] for a selection in which each query chooses blocks."""
        return cls((), target.maker(shape, np.dtype(np.int32)), lambda lists: ChosenBlocks(lists, block))


class Selection:
    """A selection of blocks that only launches kernels, for q and k of one layout.

    Its kernels share memory that the stream keeps. A call allocates only the lists of its result.

    Parameters
    ----------
    steps : sequence of (Pass or BoundPass, dict of str by name)
        The kernels, compiled immediately, each with the new names of its arrays that are renamed. They read q
        and k, and write to the workspaces; the last one writes "kept", or the lists of queries.
    workspaces : dict of Workspace by name
    lists : Lists
    target : Gpu
    prepare : callable (q, k), optional
        Computes the arrays that the kernels read instead of q and k.
    """

    def __init__(
        self, steps: Sequence[Step], workspaces: Mapping[str, Workspace], lists: Lists, target: gpu.Gpu,
        prepare: Callable[[Array, Array], tuple[Array, Array]] | None = None,
    ) -> None:  # fmt: skip
        own = [spec for step, _ in steps if isinstance(step, Pass) for spec in step.specs.values()]
        gpu.compile_kernels(own, target)
        parts, works = list[tuple[LaunchRecord, Mapping[str, str]]](), list[WorkList]()
        for step, names in (*steps, *lists.steps):
            if isinstance(step, Pass):
                parts.append((pass_record(step, {}, arrays_of(step), target), names))
            else:
                parts.append((step.record, names))
                works += step.works
        self._launches = BoundPass(LaunchRecord.joined(parts, ("q", "k", AT_CALL), workspaces), target, works)
        self._result_of, self._allocate, self._address = lists.result_of, lists.allocate, target.address
        self._current_stream, self._prepare = target.stream, prepare
        self._captured: list[Array] = []

    def __call__(self, q: Array, k: Array) -> Any:
        """Return the chosen blocks as an index, or as lists of each query, on the device."""
        stream = self._current_stream()
        if self._prepare is not None:
            q, k = self._prepare(q, k)
        lists = self._allocate()
        taken = self._launches.launch((self._address(q), self._address(k), self._address(lists)), stream)
        if stream.is_capturing():  # each replay writes to the lists, and reads their inputs
            self._captured += [*taken, q, k]
            gpu.hold(self)
        return self._result_of(lists)


class FixedSelection:
    """A selection of blocks that depends only on the layout of q and k: a call builds the index without choosing.

    Each call returns a new index, since a caller may write to the arrays of an index on a device.

    Parameters
    ----------
    chosen : NumPy bool array [num_q_blocks, num_kv_blocks]
        The blocks that every head keeps. They are copied to the device immediately.
    maker_of : callable
        Returns the index maker for chosen blocks with the layout of a device array, or None.
    target : Gpu
    """

    def __init__(self, chosen: Any, maker_of: Callable[[Array], IndexMaker | None], target: gpu.Gpu) -> None:
        self._lists = target.guarded(self, {"kept": target.sent(chosen)})
        self._make_index = maker_of(self._lists.arrays["kept"])
        self._address = target.mask_address(self._lists.arrays["kept"])
        self._current_stream = target.stream

    @property
    def makes_index(self) -> bool:
        """True if there are kernels that build the index."""
        return self._make_index is not None

    def __call__(self, q: Array, k: Array) -> BlockIndex:
        """Return the blocks in a new index on the device."""
        assert self._make_index is not None
        stream = self._current_stream()
        self._lists.use(stream)
        if stream.is_capturing():  # each replay reads the blocks and the inputs of the lists
            gpu.hold(self)
        return self._make_index((self._address,), stream)
