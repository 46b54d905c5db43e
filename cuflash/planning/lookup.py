"""Keys of calls in the cache, and the arrays of a call's mask, whose contents keys leave out."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple
from weakref import ref

from ..blocks.carried import Owner
from ..blocks.index import BlockIndex
from ..masks.one_array import MaskContents, mask_contents
from .options import Options


class Lookup(NamedTuple):
    """What the key of a call is made of.

    Attributes
    ----------
    options : Options
        Without the mask if its contents, or its owner, stand for it.
    contents : MaskContents or None
        The arrays of a mask on a device.
    owner : Owner or None
        That of a block index on the host, with which the call leaves the cache.
    """

    options: Options
    contents: MaskContents | None = None
    owner: Owner | None = None

    def key(self, kind: str, layout: Hashable, *more: Hashable) -> Hashable:
        """Return the key of a call of this kind: `Options.key`, with the layout of the mask's arrays and its owner.

        None if the call cannot be cached.
        """
        key = self.options.key(layout, None if self.contents is None else self.contents.key, *more)
        return None if key is None else (kind, None if self.owner is None else ref(self.owner), key)


def lookup(options: Options, layout_of: Callable[..., Hashable]) -> Lookup:
    """Split the mask of a call into what its key holds and the arrays that each call hands over.

    The lists that an index on a device carries are its contents. `layout_of` returns the layout of an array of a mask.
    """
    mask = options.mask
    if mask is None:
        return Lookup(options)
    if type(mask) is BlockIndex:
        without = options._replace(mask=None)
        if mask.kept is not None:
            return Lookup(without, owner=mask.kept.owner)
        if mask.carried is not None:
            return Lookup(without, MaskContents(mask.carried.source, (mask.carried.lists,)))
    contents = mask_contents(mask, layout_of)
    return Lookup(options if contents is None else options._replace(mask=None), contents)
