"""Makes what the work of calls reads, at each call on a device: one allocation and some kernels, and nothing waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import Array
from ..planning.interval_kernels import IntervalSource
from ..planning.launches import Workspace, offset_of
from ..planning.list_kernels import ListSource
from .arguments import Arguments, Place
from .launch import LaunchTarget


class ListMaker:
    """Kernels that list the blocks, or find the row intervals, of masks of one layout, complete but for addresses.

    Parameters
    ----------
    source : ListSource or IntervalSource
    target : LaunchTarget
        What runs the kernels; they are compiled now.
    """

    def __init__(self, source: ListSource | IntervalSource, target: LaunchTarget) -> None:
        record = source.params()
        self._rows = None if source.rows is None else target.lists(source.rows)
        if self._rows is not None:
            for name, array in self._rows.arrays.items():
                record[source.row_names[name]] = target.address(array)
        word_of = {name: offset_of(record.dtype, name) // 8 for name in (*source.array_names, *source.written)}
        words = record.reshape(1).view(np.uint64).copy()
        places = [Place(word_of[name], 0, number) for number, name in enumerate(source.array_names)]
        places += (Place(word_of[name], start, len(source.array_names)) for name, start in source.written.items())
        self._arguments = Arguments(words, [[slice(0, len(words))]], places)
        self._allocate = target.allocator({"lists": Workspace((source.nbytes,), np.dtype(np.uint8))})
        self._target = target
        self._kept = source.rows  # its copy on the device goes with it
        self._launchers = [target.launcher(spec, grid, nbytes) for spec, grid, nbytes in source.launches()]

    @property
    def intervals(self) -> Mapping[str, Array]:
        """The row intervals that the masks are intersected with, lo and hi, where kernels read them; or nothing."""
        return {} if self._rows is None else self._rows.arrays

    def __call__(self, arrays: Sequence[int], stream: Any) -> Array:
        """Launch the kernels on arrays at these addresses; return the bytes that hold the lists once they have run."""
        (lists,) = self._allocate(stream)
        if self._rows is not None:
            self._rows.use(stream)
        buffer = self._arguments.take((*arrays, self._target.address(lists)))
        (arguments,) = buffer.kernels
        for launch in self._launchers:
            launch(arguments, stream)
        self._arguments.give_back(buffer)
        return lists
