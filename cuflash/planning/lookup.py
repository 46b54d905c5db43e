"""The cache keys of calls. A key omits the device arrays of a mask, whose contents may differ between calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from ..arrays import is_sparse
from ..blocks.index import BlockIndex
from ..masks._snapshot import Snapshot
from ..masks.base import Mask
from ..masks.content import content, has_content
from ..masks.one_array import MaskContents, mask_contents
from ._call_cache import CALLS
from .options import Options


class Lookup(NamedTuple):
    """The parts of a call's cache key.

    Attributes
    ----------
    options : Options
        The options, without the mask if `contents` or `owner` represents it.
    contents : MaskContents or None
        The arrays of a mask on a device.
    owner : object or None
        The call is removed from the cache when this object is freed. It is the owner of a block index on the host, or a
        mask with arrays or functions on the host.
    is_compared : bool
        The owner is a mask, and the cached call is valid only if the mask's contents have not changed.
    """

    options: Options
    contents: MaskContents | None = None
    owner: Any = None
    is_compared: bool = False

    def key(self, kind: str, layout: Hashable, *more: Hashable) -> Hashable:
        """Return the key of a call of this kind: `Options.key` with the layout of the mask's arrays and its owner.

        Return None if the call cannot be cached.
        """
        key = self.options.key(layout, None if self.contents is None else self.contents.key, *more)
        return None if key is None else (kind, None if self.owner is None else id(self.owner), key)

    def find(self, key: Hashable) -> Any:
        """Return the object that runs the call of a key, or None if it is not cached or the mask has changed."""
        call = CALLS.get(key)
        if call is None or not self.is_compared:
            return call
        snapshot, call = call
        return call if snapshot.is_current() else None

    def snapshot(self) -> Snapshot | None:
        """Copy the mask's contents before a call reads them; return None if the call cannot be cached."""
        return Snapshot.of(self.owner) if self.is_compared else None

    def keep(self, key: Hashable, call: Any, snapshot: Snapshot | None) -> None:
        """Cache the object that runs the call of a key, with the snapshot taken before the call was planned."""
        if not self.is_compared:
            CALLS.put(key, call, self.owner)
        elif snapshot is not None:
            CALLS.put(key, (snapshot, call), self.owner)


def lookup(options: Options, layout_of: Callable[..., Hashable]) -> Lookup:
    """Split the options of a call into the parts of its key and the mask's arrays, which each call passes again.

    For a block index on a device, these arrays are its block lists. `layout_of` returns the layout of an array of a
    mask.
    """
    mask = options.mask
    if mask is None:
        return Lookup(options)
    if type(mask) is BlockIndex:
        without = options._replace(mask=None)
        if mask._kept is not None:
            return Lookup(without, owner=mask._kept.owner)
        if mask._carried is not None:
            return Lookup(without, MaskContents(mask._carried.source, (mask._carried.lists,)))
    if isinstance(mask, Mask) and has_content(mask):
        return Lookup(options)
    contents = mask_contents(mask, layout_of)
    if contents is not None:
        return Lookup(options._replace(mask=None), contents)
    if isinstance(mask, Mask):
        with suppress(TypeError):
            content(mask)
            return Lookup(options)
    elif type(mask) not in (np.ndarray, FunctionType) and not is_sparse(mask):
        return Lookup(options)
    return Lookup(options._replace(mask=None), owner=mask, is_compared=True)
