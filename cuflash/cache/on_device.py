"""What the kernels of a cache read on a GPU: lengths, the page table, and a count of what was out of range."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, describe, is_array, namespace
from ..errors import UnsupportedProblem
from ..executors import appending, decoding, gpu
from ..planning.appending import append_plan
from ..planning.decoding import CacheLayout, DecodePlan
from ..planning.launches import Launch
from .pages import OwnPages, PagePool


class OnDevice:
    """Lengths and the page table of a cache on the current device, as the host last put or let change them.

    Parameters
    ----------
    k, v : arrays of CuPy
        The cache's pages.
    layout : CacheLayout
    batch : int
    is_paged : bool
    """

    def __init__(self, k: Array, v: Array, layout: CacheLayout, batch: int, is_paged: bool) -> None:
        xp = namespace(k)
        self.k, self.v, self.layout = k, v, layout
        self.lengths = xp.zeros((batch,), np.int32)
        self.num_faults = xp.zeros((1,), np.int32)
        self.table = xp.full((batch, layout.max_pages), -1, np.int32) if is_paged else None
        self._known_lengths: list[int] | None = [0] * batch
        self._known_version = -1
        self._arrived_blocks = xp.zeros((batch,), np.int32)
        self._arrived_parts = xp.zeros((batch, int(k.shape[1])), np.int32)
        self._captured: list[Any] = []

    def put(self, lengths: list[int] | None, pages: OwnPages | PagePool) -> None:
        """Send lengths and the table where they are not what the device has; lengths of None are known there alone.

        Raises
        ------
        RuntimeError
            Something would have to be sent inside a stream capture.
        """
        if lengths is None:
            self._known_lengths = None
        elif lengths != self._known_lengths:
            self._send(self.lengths, np.array(lengths, np.int32))
            self._known_lengths = list(lengths)
        if self.table is not None and isinstance(pages, PagePool) and pages.version != self._known_version:
            self._send(self.table, pages.table(self.layout.max_pages))
            self._known_version = pages.version

    def _send(self, to: Array, array: Any) -> None:
        if is_capturing():
            raise RuntimeError(
                "a cache's lengths and page table must be on the device before a stream capture: call count_on_device()"
            )
        to[...] = namespace(to).asarray(array)

    def counts(self, counts: Any) -> Array | None:
        """Counts as the kernels read them, from a list of ints or an array on the device."""
        if counts is None or not isinstance(counts, list):
            return counts
        if is_capturing():
            raise UnsupportedProblem(["counts must lie on the device inside a stream capture; got numbers on the host"])
        return namespace(self.k).asarray(np.array(counts, np.int32))

    def append(self, k: Array, v: Array, counts: Any, new_lengths: list[int] | None) -> None:
        """Launch the kernel that writes rows and adds to the lengths, which the host knows afterwards, or does not."""
        plan = append_plan(tuple(map(int, k.shape)), int(v.shape[3]), np.dtype(k.dtype), self.layout)
        counts = self.counts(counts)
        arrays = {**self.tables(counts), "k": k, "v": v, "cache_k": self.k, "cache_v": self.v}
        target = decoding.target_of("gpu")
        self._require_ready(plan.launch)
        appending.append(plan, arrays, target, [self._arrived_blocks])
        self.keep([k, v, counts])
        self._known_lengths = new_lengths

    def decode(self, plan: DecodePlan, arrays: dict[str, Array | None]) -> None:
        """Launch the decode kernel; counts of arrived parts, which it leaves at 0, are the cache's own."""
        self._require_ready(plan.launch)
        xp, target = namespace(self.k), decoding.target_of("gpu")
        made = [
            self._arrived_parts if each.is_zeroed else xp.empty(each.shape, each.dtype)
            for each in plan.workspaces.values()
        ]
        self.keep([*arrays.values(), *decoding.decode(plan, arrays, target, made)])

    def _require_ready(self, launch: Launch) -> None:
        if is_capturing():
            gpu.require_compiled([launch], "make the same call on the cache once before the capture")

    def tables(self, counts: Array | None) -> dict[str, Array | None]:
        """What kernels read beside keys and values, by name."""
        return {"table": self.table, "lengths": self.lengths, "counts": counts, "num_faults": self.num_faults}

    def keep(self, arrays: list[Any]) -> None:
        """Hold what a captured call uses as long as the cache: each replay writes there."""
        if is_capturing():
            self._captured.extend(arrays)


def is_capturing() -> bool:
    """Whether CuPy's current stream is being captured."""
    return bool(gpu.namespace().cuda.get_current_stream().is_capturing())


def is_on_device(value: Any) -> bool:
    """Whether a value is an array that is not the host's."""
    return is_array(value) and not isinstance(value, np.ndarray)


def device_reasons(name: str, value: Any, batch: int, like: Array) -> list[str]:
    """Why an array on a device is not one int32 for each sequence."""
    is_right = namespace(value) is namespace(like) and tuple(value.shape) == (batch,) and value.dtype == np.int32
    if is_right and value.strides == (4,):
        return []
    return [
        f"{name} on a device must be a contiguous {namespace(like).__name__} array of {batch} int32, one for each "
        f"sequence; got {describe(value)} of shape {tuple(value.shape)} and dtype {value.dtype}"
    ]
