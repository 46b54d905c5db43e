"""Records attached to a block index: its lists on a device, or its mask and the owner of its cached calls."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arrays import Array
from .index_mask import IndexMask


class Owner:
    """The owner of cached calls, which leave the cache when this object is freed. Their keys contain its `id`."""


class KeptIndex(NamedTuple):
    """The mask of a block index on the host, which caches its work lists, and the owner of its cached calls.

    Neither field may refer to the index: a reference cycle would keep device memory until the garbage collector runs.

    Attributes
    ----------
    mask : IndexMask
        A mask with the same arrays; it holds a copy of the index instead of the index itself.
    owner : Owner
        Calls with the index leave the cache when nothing refers to the index.
    """

    mask: IndexMask
    owner: Owner


class CarriedLists(NamedTuple):
    """The block lists of an index on a device, in the format of the kernels; they are built with the index.

    Attributes
    ----------
    lists : uint8 array
        All lists, one after the other.
    source : ListSource
        The object that has the positions of the lists in the array; all indices of one layout share it.
    """

    lists: Array
    source: Any

    @property
    def arrays(self) -> dict[str, Array]:
        """The lists, by the same names as in `ListedWork.lists`."""
        views: dict[str, Array] = self.source.lists_of(self.lists)
        return views

    @property
    def fields(self) -> dict[str, Array]:
        """The arrays of an index by the names of its fields, except for the row intervals."""
        views: dict[str, Array] = self.source.fields_of(self.lists)
        return views
