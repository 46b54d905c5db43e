"""The `gpu` executor on buffers of XLA: XLA provides the memory, workspaces included, and the stream."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, to_host
from ..blocks.work_list import WorkList
from ..compiler.earlier_failure import raise_earlier
from ..layouts import dense_strides
from ..planning.launches import Workspace
from ..planning.list_kernels import AT_CALL, WorkAtCall
from ..planning.plan import KernelPlan
from ..planning.spec import KernelSpec
from . import gpu
from ._records import LaunchRecord, View
from .arguments import Words
from .launch import pass_record
from .params import attention_record

_ALIGNMENT = 256  # alignment in bytes of each part of a buffer


def address(buffer: Any) -> int:
    """Return the address of a buffer's first element; DLPack would take twice as long."""
    return int(buffer.__cuda_array_interface__["data"][0])


def packed(lists: Mapping[Any, Array]) -> tuple[dict[Any, int], Array]:
    """Copy the arrays of a work list on the host, one after the other, into one array of bytes.

    The size of each is rounded up to three times a power of two, so that lists of similar lengths have equal positions.
    The lengths of lists that keep half or a quarter of the blocks are often near powers of two.

    Returns
    -------
    dict of int by key
        Where each array starts, in bytes.
    uint8 array
    """
    sizes = (3 * max(_ALIGNMENT, 1 << ((array.nbytes - 1) // 3).bit_length()) for array in lists.values())
    *starts, nbytes = accumulate(sizes, initial=0)
    memory = np.zeros(nbytes, np.uint8)
    for start, array in zip(starts, lists.values()):
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return dict(zip(lists, starts)), memory


class Source(NamedTuple):
    """A value of a call: the address of a buffer of XLA plus an offset or, without a buffer, a number."""

    buffer: int | None
    offset: int = 0


class Flat(NamedTuple):
    """The launches of a pass on one device as numbers.

    Attributes
    ----------
    words : array of uint64
        The arguments of all kernels, with numbers that are the same in each call.
    places : list of (int, int, int)
        (word, buffer, offset): words that a call sets to the address of a buffer plus an offset.
    kernels : list of (int, int, int, int, list of int)
        Function, grid, threads, bytes of shared memory, and the first word of each argument.
    zeros : list of (int, int, int)
        (buffer, offset, bytes): memory that is set to zero before the first kernel.
    num_buffers : int
        Arguments, then results, of which the last one is the scratch buffer, if there is one.
    scratch_bytes : int
        Memory that each call needs in addition to its arrays and results.
    number : int
        A digest of the launches, which is the same in all processes.
    """

    words: Words
    places: list[tuple[int, int, int]]
    kernels: list[tuple[int, int, int, int, list[int]]]
    zeros: list[tuple[int, int, int]]
    num_buffers: int
    scratch_bytes: int
    number: int

    def launch(self, buffers: Sequence[int], stream: int) -> None:
        """Launch the kernels on buffers at these addresses, as the function in C++ does."""
        cuda, words = gpu.namespace().cuda, self.words.copy()
        for buffer, offset, nbytes in self.zeros:
            cuda.runtime.memsetAsync(buffers[buffer] + offset, 0, nbytes, stream)
        for word, buffer, offset in self.places:
            words[word] = buffers[buffer] + offset
        for function, grid, threads, shared_bytes, starts in self.kernels:
            table = np.array(starts, np.uint64) * 8 + words.ctypes.data
            sizes = grid, 1, 1, threads, 1, 1, shared_bytes
            try:
                cuda.driver.launchKernel(function, *sizes, stream, table.ctypes.data, 0)
            except RuntimeError as error:
                raise_earlier(error)
                raise


def placed(needs: Sequence[Workspace], start: int) -> tuple[list[int], int, int]:
    """Return where workspaces start, where those that must be zero end, which come first, and where all end."""
    order = sorted(range(len(needs)), key=lambda number: not needs[number].is_zeroed)
    *starts, end = accumulate(map(_aligned, (needs[number].nbytes for number in order)), initial=start)
    num_zeroed = sum(need.is_zeroed for need in needs)
    return [starts[order.index(number)] for number in range(len(needs))], (*starts, end)[num_zeroed], end


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _maker(work: WorkList) -> Any:
    """Return the source of the kernels that list a mask at each call; None if the lists are complete."""
    return work.source if isinstance(work, WorkAtCall) and work.carried is not work.source else None


def lists_of(work: WorkList) -> dict[tuple[bool, str], Array]:
    """Return the arrays of a work list by (False, name), and those that kernels read to list a mask by (True, name)."""
    works = (False, work), (True, getattr(_maker(work), "rows", None))
    every = [(key, each.lists) for key, each in works if each is not None and each.nbytes]
    return {(key, name): to_host(array) for key, lists in every for name, array in lists.items()}


def flat(
    plan: KernelPlan, name: str, inputs: Mapping[str, tuple[View, Source]], axes: Mapping[str, Sequence[int]],
    of_mask: Sequence[Source], lists: Mapping[tuple[bool, str], Source], numbers: Sequence[int], num_arguments: int,
) -> Flat:  # fmt: skip
    """Return the launches of a pass on the current device, with those that list the mask before them, as numbers.

    The scratch buffer has the lists, then the workspaces of all kernels.

    Parameters
    ----------
    plan : KernelPlan
    name : str
        The pass.
    inputs : dict of (View, Source) by name
        Dense buffers, with the names that executors use.
    axes : dict of sequence of int by name
        The axes of results in memory order, outermost first. Results that it does not name are in C order.
    of_mask : sequence of Source
        The mask's arrays.
    lists : dict of Source
        The arrays of `lists_of`.
    numbers : sequence of int
        Seed and offset of dropout.
    num_arguments : int
        Buffers before those of results.
    """
    machine, source, results = gpu.current_target(), _maker(plan.work), plan.kernel_results(name)
    scratch, parts, start = num_arguments + len(results), list[tuple[LaunchRecord, list[Source]]](), 0
    of_maker, of_work = ({each: lists[key, each] for key, each in lists if key == kind} for kind in (True, False))
    inputs = {**inputs, **{each: (View.of_new(each, plan.work.lists[each]), of_work[each]) for each in of_work}}
    if isinstance(plan.work, WorkAtCall):
        nbytes = plan.work.source.nbytes
        listed = of_mask[0] if source is None else Source(scratch)
        inputs[AT_CALL] = View(AT_CALL, np.dtype(np.uint8), (nbytes,), (1,)), listed
    if source is not None:
        start = _aligned(nbytes)
        gpu.compile_kernels(source.kernels.specs.values(), machine)
        record = pass_record(source.kernels, {}, (*source.array_names, AT_CALL, *of_maker), machine)
        parts.append((record, [*of_mask, listed, *of_maker.values()]))
    views = {each: view for each, (view, _) in inputs.items()}
    kernels = plan.pass_of(name, views)
    machine.prepare(kernels)
    every = *views.values(), *(View.of_new(each, result, axes.get(each)) for each, result in results.items())
    last = attention_record(plan, kernels, every, machine.tensor_map, {})
    named = [of_input for _, of_input in inputs.values()] + [Source(num_arguments + n) for n in range(len(results))]
    parts.append((last, [*named, *(Source(None, number) for number in numbers)]))
    needs = [need for record, _ in parts for need in record.workspaces.values()]
    starts, end_of_zeros, scratch_bytes = placed(needs, start)
    zeros = [(scratch, start, end_of_zeros - start)] if end_of_zeros > start else []
    zeros += [(*named[place], nbytes) for place, nbytes in last.zeroed]  # type: ignore[misc]  # they are buffers
    places, kernel_numbers, first = list[tuple[int, int, int]](), list[tuple[int, int, int, int, list[int]]](), 0
    words, texts, workspaces = list[Words](), list[tuple[KernelSpec, int, int, list[int]]](), iter(starts)
    for record, sources in parts:
        sources += [Source(scratch, next(workspaces)) for _ in record.workspaces]
        words.append(record.words.copy())
        for word, offset, number in record.places:
            buffer, more = sources[number]
            if buffer is None:
                words[-1][word] = (offset + more) % (1 << 64)
            else:
                places.append((first + word, buffer, offset + more))
        for launch, grid, arguments in record.kernels:
            function = gpu._function(launch.spec, launch.shared_bytes).ptr
            of_arguments = [first + part.start for part in arguments]
            kernel_numbers.append((function, grid, launch.spec.num_threads, launch.shared_bytes, of_arguments))
            texts.append((launch.spec, grid, launch.shared_bytes, of_arguments))
        first += len(record.words)
    all_words = np.concatenate(words)
    digest = hashlib.sha256(repr((texts, all_words.tolist(), places, zeros, scratch_bytes)).encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    return Flat(all_words, places, kernel_numbers, zeros, scratch + bool(scratch_bytes), scratch_bytes, number)


def within(device: int, work: Callable[[], Any]) -> Any:
    """Call a function while a device is current; XLA's threads may have another current device."""
    cuda = gpu.namespace().cuda
    if cuda.runtime.getDevice() == device:
        return work()
    with cuda.Device(device):
        return work()


def as_cupy_stream(ptr: int) -> Any:
    """Return an XLA stream as a CuPy stream; a `with` block makes it CuPy's current stream."""
    return gpu.namespace().cuda.Stream.from_external(_Exported(ptr))


class _Exported(NamedTuple):
    """A stream that exports itself by CUDA's stream protocol."""

    ptr: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


def as_cupy(buffer: Any, view: View, device: int) -> Array:
    """Return a buffer as a CuPy array with the layout of a view, without a copy."""
    cupy = gpu.namespace()
    memory = cupy.cuda.UnownedMemory(address(buffer), view.nbytes, buffer, device)
    return cupy.ndarray(view.shape, view.dtype, cupy.cuda.MemoryPointer(memory, 0), view.strides)


def without_data(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Return a CuPy array with the layout of a dense array of this shape, for plans; nothing may read its elements."""
    cupy = gpu.namespace()
    strides = tuple(step * dtype.itemsize for step in dense_strides(shape))
    return cupy.lib.stride_tricks.as_strided(cupy.empty((1,), dtype), shape, strides)
