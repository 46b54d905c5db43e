"""Work lists built at each call on a device, with one allocation and a few kernels, and without waiting."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..arrays import Array
from ..planning.chosen_lists import UnionSource
from ..planning.interval_kernels import IntervalSource
from ..planning.list_kernels import AT_CALL, ListSource
from .launch import BoundPass, LaunchTarget
from .workspaces import Stream


class ListMaker:
    """Kernels that list the blocks, join the lists or compute the row intervals of masks of one layout.

    Attributes
    ----------
    launches : BoundPass
        The launches, which take the addresses of the mask's arrays and of the bytes that hold the lists.
    allocate : callable
        Allocates the array of bytes that holds the lists.

    Parameters
    ----------
    source : ListSource, IntervalSource or UnionSource
    target : LaunchTarget
        The device that runs the kernels; they are compiled immediately.
    """

    def __init__(self, source: ListSource | IntervalSource | UnionSource, target: LaunchTarget) -> None:
        self.launches = BoundPass.of(source.kernels, {}, (*source.array_names, AT_CALL), target, source.rows)
        self.allocate = target.maker((source.nbytes,), np.dtype(np.uint8))
        self._address = target.address

    def __call__(self, arrays: Iterable[int], stream: Stream) -> Array:
        """Launch the kernels on arrays at these addresses; return the bytes that the kernels will write."""
        lists = self.allocate()
        self.launches.launch((*arrays, self._address(lists)), stream)
        return lists
