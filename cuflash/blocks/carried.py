"""Records attached to a block index: its lists on a device, or its mask and the owner of its cached calls."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arrays import Array
from .index_mask import IndexMask


class Owner:
    """Own cached calls: they leave the cache of calls when nothing refers to this object. Their keys hold its `id`."""


class KeptIndex(NamedTuple):
    """The mask of a block index on the host, which keeps its work lists, and the owner of its cached calls.

    Nothing here may lead back to the index: a circle would keep memory of a device until Python's collector runs.

    Attributes
    ----------
    mask : IndexMask
        A mask of the same arrays, which holds a copy of the index and not the index itself.
    owner : Owner
        Calls with the index leave the cache of calls when nothing refers to the index.
    """

    mask: IndexMask
    owner: Owner


class CarriedLists(NamedTuple):
    """The lists of an index on a device, in the form that kernels walk; they are made with the index.

    Attributes
    ----------
    lists : uint8 array
        All of them, one after the other.
    source : ListSource
        How they lie in the array: one object for all indices of one layout.
    """

    lists: Array
    source: Any

    @property
    def arrays(self) -> dict[str, Array]:
        """The lists by name, as `ListedWork.lists` has them."""
        found: dict[str, Array] = self.source.lists_of(self.lists)
        return found

    @property
    def fields(self) -> dict[str, Array]:
        """The arrays of an index by the names of its fields, but for the row intervals."""
        found: dict[str, Array] = self.source.fields_of(self.lists)
        return found
