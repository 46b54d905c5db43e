"""Makes the lists of a mask's blocks on a device, at each call: one allocation and four kernels, and nothing waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import Array
from ..planning.launches import Workspace
from ..planning.list_kernels import LIST_PARAMS, LIST_SPECS, ListSource
from .arguments import Arguments, Place
from .launch import LaunchTarget

_SHARED_BYTES = {"pointers": 4}  # bytes for each thread


def _word(name: str) -> int:
    assert LIST_PARAMS.fields is not None
    return LIST_PARAMS.fields[name][1] // 8


class ListMaker:
    """Four kernels that list the blocks of masks of one layout, complete but for addresses.

    Parameters
    ----------
    source : ListSource
    target : LaunchTarget
        What runs the kernels; they are compiled now.
    """

    def __init__(self, source: ListSource, target: LaunchTarget) -> None:
        record = source.params()
        self._rows = None if source.rows is None else target.lists(source.rows)
        if self._rows is not None:
            for name, array in self._rows.arrays.items():
                record[name] = target.address(array)
        words = record.reshape(1).view(np.uint64).copy()
        offsets = {name: start for name, start in source.offsets.items() if name != "bits" or not source.is_whole}
        places = [Place(_word("mask"), 0, 0), *(Place(_word(name), start, 1) for name, start in offsets.items())]
        self._arguments = Arguments(words, [[slice(0, len(words))]], places)
        self._allocate = target.allocator({"lists": Workspace((source.nbytes,), np.dtype(np.uint8))})
        self._target = target
        self._kept = source.rows  # its copy on the device goes with it
        self._launchers = [
            target.launcher(LIST_SPECS[entry], grid, _SHARED_BYTES.get(entry, 0) * LIST_SPECS[entry].num_threads)
            for entry, grid in source.grids().items()
        ]

    @property
    def intervals(self) -> Mapping[str, Array]:
        """The row intervals that the masks are intersected with, lo and hi, where kernels read them; or nothing."""
        return {} if self._rows is None else self._rows.arrays

    def __call__(self, mask: int, stream: Any) -> Array:
        """The lists of the mask at an address, as bytes, once the stream has come so far."""
        (lists,) = self._allocate(stream)
        if self._rows is not None:
            self._rows.use(stream)
        buffer = self._arguments.take((mask, self._target.address(lists)))
        (arguments,) = buffer.kernels
        for launch in self._launchers:
            launch(arguments, stream)
        self._arguments.give_back(buffer)
        return lists
