"""The place and the key under which a call is remembered, and the array of its mask, which each call gives anew."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from ..blocks.index import BlockIndex
from ..masks.one_array import MaskContents, mask_contents
from .options import Options

_MAX_CALLS = 512


class Lookup(NamedTuple):
    """The place where calls with some options are remembered, and the contents of their mask that keys leave out."""

    calls: dict[Hashable, Any]
    options: Options  # without the mask where its contents, or where the calls are, stand for it
    contents: MaskContents | None

    def key(self, layout: Hashable, *more: Hashable) -> Hashable:
        """`Options.key`, with how the array of the mask lies."""
        return self.options.key(layout, None if self.contents is None else self.contents.key, *more)


def lookup(options: Options, shared: dict[Hashable, Any], layout_of: Callable[..., Hashable]) -> Lookup:
    """Find the place where a call is looked up.

    Calls with a block index on the host are remembered by the index, and go with it; all others are `shared`. The lists
    that an index on a device carries are its contents.
    `layout_of` tells how an array of a mask lies.
    """
    mask = options.mask
    if mask is None:
        return Lookup(shared, options, None)
    kept = mask.remembered if type(mask) is BlockIndex else None
    if kept is not None:
        return Lookup(kept.calls, options._replace(mask=None), None)
    if type(mask) is BlockIndex and mask.carried is not None:
        return Lookup(shared, options._replace(mask=None), MaskContents(mask.carried.source, (mask.carried.lists,)))
    contents = mask_contents(mask, layout_of)
    return Lookup(shared, options if contents is None else options._replace(mask=None), contents)


def remember(calls: dict[Hashable, Any], key: Hashable, call: Any) -> None:
    """Keep a call for later ones with the same key; when there are too many, all earlier ones are forgotten."""
    if len(calls) >= _MAX_CALLS:
        calls.clear()
    calls[key] = call
