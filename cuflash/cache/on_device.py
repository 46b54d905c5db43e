"""The device's copy of a cache's state: lengths, the page table, and a counter of out-of-range accesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ..arrays import Array, describe, is_array, namespace
from ..errors import UnsupportedProblem
from ..executors import gpu
from ..layouts import kind_of
from ..planning.appending import append_pass
from ..planning.decoding import CacheLayout
from ..planning.launches import Pass
from .arguments import Counts
from .paged_rows import PagedRows
from .pages import OwnPages, PagePool
from .steps import AppendStep, DecodeStep, Request, StepCall, Steps


_COUNT_FIRST = "a cache's lengths and page table must be on the device before a stream capture: call count_on_device()"


class OnDevice:
    """The lengths and the page table of a cache on the current device, which the host writes and kernels update.

    Parameters
    ----------
    arrays : PagedRows of CuPy arrays
        The cache's pages, and the scales of FP8 rows.
    layout : CacheLayout
    batch : int
    is_paged : bool
    steps : Steps
    """

    def __init__(
        self, arrays: PagedRows, layout: CacheLayout, batch: int, is_paged: bool, steps: Steps
    ) -> None:  # fmt: skip
        xp = namespace(arrays.k)
        self.k, self.v, self.scales, self.layout = arrays.k, arrays.v, arrays.scales, layout
        self.key_bounds = arrays.key_bounds
        self.lengths = xp.zeros((batch,), np.int32)
        self.num_faults = xp.zeros((1,), np.int32)
        self.table = xp.full((batch, layout.max_pages), -1, np.int32) if is_paged else None
        self._known_lengths: list[int] | None = [0] * batch
        self._known_version = -1
        self._arrived_blocks = xp.zeros((batch,), np.int32)
        self._arrived_parts: dict[int, Array] = {}  # arrays of counters by their size
        self._captured: list[Array] = []
        self.steps = steps

    def put(self, lengths: list[int] | None, pages: OwnPages | PagePool) -> None:
        """Copy lengths and the table to the device if they have changed; `lengths` is None if the device counts them.

        Raises
        ------
        RuntimeError
            The lengths or the table have changed, and cannot be copied during a stream capture.
        """
        if lengths is None:
            self._known_lengths = None
        elif lengths != self._known_lengths:
            self._known_lengths = []  # an interrupted copy is repeated
            self._send(self.lengths, np.array(lengths, np.int32))
            self._known_lengths = list(lengths)
        if self.table is not None and isinstance(pages, PagePool) and pages.version != self._known_version:
            self._send(self.table, pages.table(self.layout.max_pages))
            self._known_version = pages.version

    def _send(self, to: Array, array: Array) -> None:
        require_no_capture()
        to[...] = namespace(to).asarray(array)

    def numbers(self, name: str, value: Counts | None) -> Array | None:
        """Return numbers per sequence in the form that kernels read, from a list of ints or an array on the device."""
        if value is None or not isinstance(value, list):
            return value
        if is_capturing():
            raise UnsupportedProblem(f"{name} must be on the device inside a stream capture; got numbers on the host")
        return namespace(self.k).asarray(np.array(value, np.int32))

    def truncate(self, lengths: Counts) -> None:
        """Shorten sequences that are longer than `lengths`, a list of ints or an array on the device."""
        namespace(self.k).minimum(self.lengths, self.numbers("lengths", lengths), out=self.lengths)

    def append(
        self, k: Array, v: Array, counts: Counts | None, new_lengths: list[int] | None, step_call: StepCall | None
    ) -> None:
        """Launch the kernel that writes rows and adds to the lengths.

        The host's lengths become `new_lengths`; None means that they become unknown. If `step_call` is None, a new step
        is bound.
        """
        counts = self.numbers("counts", counts)
        step, addresses = step_call or self._bound_append(k, v, counts)
        stream = self._stream()
        self._known_lengths = None if new_lengths is None else []  # those of an interrupted call are sent again
        step.launch((*addresses, 0 if counts is None else counts.data.ptr), stream)
        self._known_lengths = None if new_lengths is None else list(new_lengths)  # the cache updates its own list
        self._after(step, stream, k, v, counts)

    def _bound_append(self, k: Array, v: Array, counts: Array | None) -> StepCall:
        shape, dtype = tuple(map(int, k.shape)), np.dtype(k.dtype)
        kernels = append_pass(
            shape, int(v.shape[3]), dtype, self.layout, is_quantized=bool(self.scales),
            keeps_bounds=self.key_bounds is not None,
        )  # fmt: skip
        self._require_ready(kernels)
        arrays = {**self.tables(counts), **self.scales, "k": k, "v": v, "cache_k": self.k, "cache_v": self.v}
        arrays |= {"arrivals": self._arrived_blocks, "key_bounds": self.key_bounds}
        return self.steps.keep_append(k, v, AppendStep(kernels, arrays, gpu.current_target()))

    def decode_step(self, kernels: Pass, arrays: Mapping[str, Array | None], inputs: Sequence[str]) -> DecodeStep:
        """Return the step of a call of `attention`, with the cache's counters of arrived parts, which kernels reset.

        Parameters
        ----------
        kernels : Pass
        arrays : dict by name
            q, k, v, o, lse and sink, the scales of FP8 rows, and the arrays of the score function and of lists.
        inputs : sequence of str
            The names of the arrays that the call reads.
        """
        self._require_ready(kernels)
        zeroed = {name: each.shape for name, each in kernels.workspaces.items() if each.is_zeroed}
        arrived = {name: self._arrivals(prod(shape)) for name, shape in zeroed.items()}
        return DecodeStep(kernels, {**arrays, **self.tables(None), **arrived}, gpu.current_target(), inputs)

    def _arrivals(self, number: int) -> Array:
        """Return an array of this many counters of arrived parts, which kernels leave at 0; calls share it."""
        if number not in self._arrived_parts:
            self._arrived_parts[number] = namespace(self.k).zeros((number,), np.int32)
        return self._arrived_parts[number]

    def decode(self, step_call: StepCall, request: Request, o: Array, lse: Array | None, counts: Counts | None) -> None:
        """Launch the decode kernel; lse is None if the caller does not need it."""
        step, addresses = step_call
        counts, stream = self.numbers("counts", counts), self._stream()
        memory = self.steps.memory(step.nbytes)
        of_lse, of_counts = None if lse is None else lse.data.ptr, 0 if counts is None else counts.data.ptr
        step.launch((*addresses, o.data.ptr, of_counts, *step.places(memory.data.ptr, of_lse)), stream)
        self._after(step, stream, *request.arrays, o, lse, counts, memory)

    def _stream(self) -> Any:
        """Return the current stream; refuse a capture of rows that the host counts, which a replay would not change."""
        stream = self.steps.current_stream()
        if self._known_lengths is not None and stream.is_capturing():
            raise RuntimeError(_COUNT_FIRST)
        return stream

    def _after(self, step: AppendStep | DecodeStep, stream: Any, *arrays: Array) -> None:
        """Keep a captured call's arrays as long as the cache, since replays use them; wait if the step is checked."""
        if stream.is_capturing():
            self._captured.extend(arrays)
        if step.is_checked:
            step.wait()
            if faults := self.faults():
                raise RuntimeError("the cache contradicts itself: " + "; ".join(faults))

    def faults(self) -> list[str]:
        """Return the faults that kernels have counted, as sentences. The call waits for the device."""
        number = int(self.num_faults.get()[0])
        return [f"{number} times a row did not fit, or a page, a length or a count was out of range"] * bool(number)

    def _require_ready(self, kernels: Pass) -> None:
        if is_capturing():
            gpu.require_compiled(kernels.launches.values(), "make the same call on the cache once before the capture")

    def tables(self, counts: Array | None) -> dict[str, Array | None]:
        """Return the arrays that kernels read in addition to keys and values, by name."""
        return {"table": self.table, "lengths": self.lengths, "counts": counts, "num_faults": self.num_faults}


def is_capturing() -> bool:
    """True if CuPy's current stream is being captured."""
    return bool(gpu.namespace().cuda.get_current_stream().is_capturing())


def require_no_capture() -> None:
    """Refuse a call on rows that the host counts while CuPy's current stream is being captured."""
    if is_capturing():
        raise RuntimeError(_COUNT_FIRST)


def capture_reasons(what: str, pages: OwnPages | PagePool) -> list[str]:
    """Return why pages, if the cache has any, cannot be allocated or freed while CuPy's current stream is captured."""
    if not isinstance(pages, PagePool) or not is_capturing():
        return []
    return [f"{what} must come before or after a stream capture: a replay neither allocates nor frees pages"]


def is_on_device(value: Counts) -> bool:
    """True if a value is an array on a device."""
    return is_array(value) and not isinstance(value, np.ndarray)


def device_reasons(name: str, value: Array, batch: int, like: Array) -> list[str]:
    """Return why an array on a device does not have one int32 per sequence."""
    is_right = namespace(value) is namespace(like) and tuple(value.shape) == (batch,) and value.dtype == np.int32
    if is_right and value.strides == (4,):
        return []
    return [
        f"{name} on a device must be a contiguous {namespace(like).__name__} array of {batch} int32, one for each "
        f"sequence; got {kind_of(value)}, {describe(value)}, with strides {value.strides}"
    ]
