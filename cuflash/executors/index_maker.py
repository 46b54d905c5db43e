"""Block indices on the current CUDA device, built by the kernels of `ListMaker` without waiting."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from ..arrays import Array
from ..blocks import index as indices
from ..blocks.carried import CarriedLists
from ..blocks.index import BlockIndex as BlockIndex
from ..compiler import nvrtc
from ..masks.base import Band, Mask
from ..masks.block_pattern import BlockPattern
from ..masks.content import content, mask_namespace
from ..masks.one_array import mask_contents
from ..masks.shape import MaskShape
from ..planning._call_cache import CALLS
from ..planning.interval_kernels import INTERVAL_SPECS, IntervalSource
from ..planning.list_kernels import LIST_SPECS, ListSource
from . import gpu
from ._layout_key import layout_key
from .evaluation import evaluated_source
from .launch import LaunchTarget
from .list_maker import ListMaker
from .workspaces import Stream


# The fields of a source on which list kernels depend, if each call passes the row intervals.
_LAYOUT = attrgetter("strides", "element", "is_whole", "given_rows", "shape", "block", "batch", "num_heads")
_Maker: TypeAlias = "IndexMaker | IntervalIndexMaker"


class IndexMaker:
    """The kernels that build indices of masks of one layout.

    Parameters
    ----------
    source : ListSource
    target : LaunchTarget
        The device that runs the kernels; they are compiled immediately.
    """

    def __init__(self, source: ListSource, target: LaunchTarget) -> None:
        self.lists = ListMaker(source, target)
        self._source = source
        self._facts: dict[str, Array] = {
            "seqlen_q": source.shape.seqlen_q, "seqlen_kv": source.shape.seqlen_kv, "block": source.block,
            "batch": source.batch, "num_heads": source.num_heads, "lo": None, "hi": None,
        }  # fmt: skip
        if source.is_whole:
            self._facts |= self.lists.launches.lists

    def __call__(self, masks: Sequence[int], stream: Stream) -> BlockIndex:
        """Return the BlockIndex of the boolean mask at one address; its kernels are queued on the stream."""
        return self.index_of(self.lists(masks, stream))

    def index_of(self, lists: Array) -> BlockIndex:
        """Return the index with these lists."""
        return BlockIndex._of_lists(CarriedLists(lists, self._source), **self._facts)


class IntervalIndexMaker:
    """The kernels that build indices of row-interval masks of one layout; they compute intervals, then list blocks.

    Parameters
    ----------
    intervals : IntervalSource
    blocks : ListSource
        A source with `given_rows`, in which a single boolean covers all blocks.
    target : Gpu
        The device; the kernels are compiled immediately.
    """

    def __init__(self, intervals: IntervalSource, blocks: ListSource, target: gpu.Gpu) -> None:
        self._intervals, self._blocks = intervals, blocks
        self._find, self._list = ListMaker(intervals, target), ListMaker(blocks, target)
        self._true = target.guarded(self, {"mask": target.sent(np.ones(1, bool))})
        self._address = target.address

    def __call__(self, integers: Sequence[int], stream: Stream) -> BlockIndex:
        """Return the index of the mask whose integers are at these addresses; its kernels are queued on the stream."""
        self._true.use(stream)
        intervals = self._find(integers, stream)
        start, offsets = self._address(intervals), self._intervals.offsets
        mask = self._address(self._true.arrays["mask"])
        lists = self._list((mask, start + offsets["lo"], start + offsets["hi"]), stream)
        index = _of_arrays(self._blocks, lists, **self._intervals.views(intervals))
        vars(index)["is_of_rows"] = True  # `IndexMask.row_intervals` reads it
        return index


def _of_arrays(source: ListSource, lists: Array, lo: Array | None, hi: Array | None) -> BlockIndex:
    """Return an index with lists that kernels built, and the row intervals that these kernels read."""
    index = BlockIndex(
        seqlen_q=source.shape.seqlen_q, seqlen_kv=source.shape.seqlen_kv, block=source.block, batch=source.batch,
        num_heads=source.num_heads, lo=lo, hi=hi, **source.fields_of(lists),
    )  # fmt: skip
    columns = source.views(lists, ("column_pointers", "column_entries"))
    vars(index)["_columns"] = columns["column_pointers"], columns["column_entries"]
    return index


def index_of(
    chosen: Array | None, mask: Mask, shape: MaskShape, block: tuple[int, int], key: Hashable = None
) -> BlockIndex:
    """Build an index, on the current device, of the chosen blocks whose elements a mask allows.

    Parameters
    ----------
    chosen : CuPy bool array [..., num_q_blocks, num_kv_blocks], or None
        In the format of `BlockPattern`; None for all blocks of a mask that holds arrays.
    mask : Mask
        A resolved mask that is intersected with the chosen blocks; `Band()` allows everything.
    shape : MaskShape
    block : (int, int)
        Block size.
    key : hashable, optional
        The key of a mask without chosen blocks, from `repeated_index`.

    Returns
    -------
    BlockIndex
        It carries lists if the mask holds no arrays.

    Raises
    ------
    RuntimeError
        The stream is captured, and the kernels are not compiled yet.
    """
    if chosen is not None:
        maker_of_chosen = maker_of(chosen, mask, shape, block)
        if maker_of_chosen is None:
            return BlockIndex.from_mask(_whole(chosen, mask, block), block=block, **shape._asdict())
        return _index_by(maker_of_chosen, chosen)
    contents = mask_contents(mask, layout_key)
    maker = None if key is None or contents is None else _maker(key, mask, shape, block)
    if contents is None or maker is None:
        gpu.compile_kernels(LIST_SPECS.values(), gpu.current_target())
        return index_of_mask(mask, shape, block, gpu.current_target())
    return _index_by(maker, *contents.arrays)


def repeated_index(mask: Any, arguments: tuple[Any, ...]) -> tuple[Hashable, BlockIndex | None]:
    """Return the key of an index of a mask, and the index if an earlier call had these arguments and the same layout.

    This function checks nothing, since an earlier call with this key passed all checks. The key is None if the call
    cannot be cached.
    """
    contents = mask_contents(mask, layout_key)
    if contents is None:
        return None, None
    try:
        key = "index", contents.key, repr(arguments)  # repr distinguishes 1 from True
    except ValueError:  # an int with more digits than Python converts to str, which is refused elsewhere
        return None, None
    cached: tuple[_Maker | None] | None = CALLS.get(key)
    if cached is None or cached[0] is None:
        return key, None
    return key, _index_by(cached[0], *contents.arrays)


def _index_by(maker: _Maker, *arrays: Array) -> BlockIndex:
    """Return the index of chosen blocks, or of a mask, from arrays on the current device."""
    target = gpu.current_target()
    stream = target.stream()
    if stream.is_capturing():
        gpu.hold(maker)
    return maker([target.mask_address(array) for array in arrays], stream)


def index_of_mask(mask: Mask, shape: MaskShape, block: tuple[int, int], target: gpu.Gpu) -> BlockIndex:
    """Return the index of a mask that holds arrays on the device of `target`.

    If `evaluated_source` cannot read the mask by blocks, this temporarily needs one byte per element.
    """
    mask, xp = mask.resolve(shape), mask_namespace(mask)
    if 0 in (shape.num_batch, *shape[1:]):
        empty = BlockIndex.from_mask(~Band(), block=block, **shape._asdict())
        return empty.to(lambda array: xp.zeros(array.shape, dtype=array.dtype))
    source, arrays = evaluated_source(mask, shape, block)
    key = "list", target, target.device, *_LAYOUT(source)
    maker: IndexMaker = CALLS.get_or_make(key, partial(IndexMaker, source, target))
    lists = maker.lists([target.mask_address(array) for array in arrays], target.stream())
    if source.given_rows is None:
        return maker.index_of(lists)
    return _of_arrays(source, lists, *(arrays[1:] if source.is_whole else (None, None)))


def _whole(chosen: Array, mask: Mask, block: tuple[int, int]) -> Mask:
    pattern = BlockPattern(chosen, block)
    return pattern if mask == Band() else pattern & mask


def index_key(device: int, chosen: Array, mask: Mask, shape: MaskShape, block: tuple[int, int]) -> Hashable:
    """Return the key of an index maker, which does not depend on the chosen blocks; None if the mask may change."""
    try:
        return "index", device, tuple(chosen.shape), tuple(chosen.strides), content(mask), shape, block
    except TypeError:
        return None


def maker_of(chosen: Array, mask: Mask, shape: MaskShape, block: tuple[int, int]) -> IndexMaker | None:
    """Return the maker of indices of chosen blocks with this layout, or None if no kernel supports them."""
    key = index_key(nvrtc.current_device()[1], chosen, mask, shape, block)
    maker = None if key is None else _maker(key, _whole(chosen, mask, block), shape, block)
    assert not isinstance(maker, IntervalIndexMaker)
    return maker


def _maker(key: Hashable, mask: Mask, shape: MaskShape, block: tuple[int, int]) -> _Maker | None:
    """Return the maker of indices of masks with this layout, from the cache; None if no kernel supports them."""
    cached: tuple[_Maker | None] = CALLS.get_or_make(key, lambda: (_new_maker(mask.resolve(shape), shape, block),))
    return cached[0]


def _new_maker(mask: Mask, shape: MaskShape, block: tuple[int, int]) -> _Maker | None:
    """Return a new maker of indices of resolved masks with this layout."""
    target, listed = gpu.current_target(), ListSource.of(mask, shape, block)
    if listed is not None:
        gpu.compile_kernels(LIST_SPECS.values(), target)
        return IndexMaker(listed[0], target)
    intervals = IntervalSource.of(mask, shape, None)
    if intervals is None:
        return None
    blocks = ListSource(
        strides=(0,) * (len(shape.batch) + 3), element=block, is_whole=True, rows=None, shape=shape, block=block,
        batch=intervals.batch, num_heads=intervals.num_heads, given_rows=(intervals.batch, intervals.num_heads),
    )  # fmt: skip
    if not blocks.can_be_numbered:
        return None
    gpu.compile_kernels([*LIST_SPECS.values(), *INTERVAL_SPECS.values()], target)
    return IntervalIndexMaker(intervals, blocks, target)


indices.find_on_device, indices.make_on_device = repeated_index, index_of
