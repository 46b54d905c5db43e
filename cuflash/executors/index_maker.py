"""Makes block indices on the current CUDA device by the kernels of `ListMaker`, without a wait."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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


# What kernels of lists depend on, if each call hands over the row intervals.
_LAYOUT = attrgetter("strides", "element", "is_whole", "given_rows", "shape", "block", "batch", "num_heads")
_Maker: TypeAlias = "IndexMaker | IntervalIndexMaker"


class IndexMaker:
    """The kernels that make indices of masks of one layout.

    Parameters
    ----------
    source : ListSource
    target : LaunchTarget
        What runs the kernels; they are compiled now.
    """

    def __init__(self, source: ListSource, target: LaunchTarget) -> None:
        self.lists = ListMaker(source, target)
        self._source = source
        self._facts: dict[str, Any] = {
            "seqlen_q": source.shape.seqlen_q, "seqlen_kv": source.shape.seqlen_kv, "block": source.block,
            "batch": source.batch, "num_heads": source.num_heads, "lo": None, "hi": None,
        }  # fmt: skip
        if source.is_whole:
            self._facts |= self.lists.launches.lists

    def __call__(self, mask: int, stream: Any) -> BlockIndex:
        """The index of the mask at an address, once the stream has come so far."""
        return self.index_of(self.lists((mask,), stream))

    def index_of(self, lists: Array) -> BlockIndex:
        """The index that lists make."""
        return BlockIndex._of_lists(CarriedLists(lists, self._source), **self._facts)


class IntervalIndexMaker:
    """The kernels that make indices of masks of row intervals of one layout: first the intervals, and then the blocks.

    Parameters
    ----------
    intervals : IntervalSource
    blocks : ListSource
        With `given_rows`; a boolean stands for all blocks.
    target : Gpu
        The device; the kernels are compiled now.
    """

    def __init__(self, intervals: IntervalSource, blocks: ListSource, target: gpu.Gpu) -> None:
        self._intervals, self._blocks = intervals, blocks
        self._find, self._list = ListMaker(intervals, target), ListMaker(blocks, target)
        self._true = target.guarded(self, {"mask": target.sent(np.ones(1, bool))})
        self._address = target.address

    def __call__(self, integers: Sequence[int], stream: Any) -> BlockIndex:
        """The index of the mask with integers at these addresses, once the stream has come so far."""
        self._true.use(stream)
        found = self._find(integers, stream)
        start, offsets = self._address(found), self._intervals.offsets
        mask = self._address(self._true.arrays["mask"])
        lists = self._list((mask, start + offsets["lo"], start + offsets["hi"]), stream)
        return _of_arrays(self._blocks, lists, **self._intervals.views(found))


def _of_arrays(source: ListSource, lists: Array, lo: Array | None, hi: Array | None) -> BlockIndex:
    """An index of lists that kernels have made, and of the row intervals that they read."""
    index = BlockIndex(
        seqlen_q=source.shape.seqlen_q, seqlen_kv=source.shape.seqlen_kv, block=source.block, batch=source.batch,
        num_heads=source.num_heads, lo=lo, hi=hi, **source.fields_of(lists),
    )  # fmt: skip
    columns = source.views(lists, ("column_pointers", "column_entries"))
    vars(index)["_columns"] = columns["column_pointers"], columns["column_entries"]
    return index


def index_of(
    kept: Array | None, mask: Mask, shape: MaskShape, block: tuple[int, int], key: Hashable = None
) -> BlockIndex:
    """An index, on the current device, of chosen blocks whose elements a mask allows.

    Parameters
    ----------
    kept : CuPy bool array [..., num_q_blocks, num_kv_blocks], or None
        As `BlockPattern` takes it; None for all blocks of a mask that holds arrays.
    mask : Mask
        A resolved one beside chosen blocks; `Band()` allows everything.
    shape : MaskShape
    block : (int, int)
        Sides of the blocks.
    key : hashable, optional
        That of a mask without chosen blocks, as `repeated_index` returns it.

    Returns
    -------
    BlockIndex
        One that carries lists if the mask of the chosen blocks holds no arrays.

    Raises
    ------
    RuntimeError
        The stream is captured, and the kernels are not compiled yet.
    """
    if kept is not None:
        of_kept = maker_of(kept, mask, shape, block)
        if of_kept is None:
            return BlockIndex.from_mask(_whole(kept, mask, block), block=block, **shape._asdict())
        return _made(of_kept, kept)
    contents = mask_contents(mask, layout_key)
    maker = None if key is None or contents is None else _maker(key, mask, shape, block)
    if contents is None or maker is None:
        gpu.compile_kernels(LIST_SPECS.values(), gpu.current_target())
        return index_of_mask(mask, shape, block, gpu.current_target())
    return _made(maker, *contents.arrays)


def repeated_index(mask: Any, arguments: tuple[Any, ...]) -> tuple[Hashable, BlockIndex | None]:
    """The key of an index of a mask, and the index if one of a mask that lies alike was made with these arguments.

    Nothing is checked: equal keys mean that the call was made before. The key is None where calls are not remembered.
    """
    contents = mask_contents(mask, layout_key)
    if contents is None:
        return None, None
    try:
        key = "index", contents.key, repr(arguments)  # 1 and True differ
    except ValueError:  # an int of more digits than Python writes, which is refused
        return None, None
    cached: tuple[_Maker | None] | None = CALLS.get(key)
    if cached is None or cached[0] is None:
        return key, None
    return key, _made(cached[0], *contents.arrays)


def _made(maker: _Maker, *arrays: Array) -> BlockIndex:
    """The index of chosen blocks, or of a mask, of arrays on the current device."""
    target = gpu.current_target()
    stream = target.current_stream()
    if stream.is_capturing():
        gpu.hold(maker)
    addresses = [target.mask_address(array) for array in arrays]
    return maker(addresses, stream) if isinstance(maker, IntervalIndexMaker) else maker(addresses[0], stream)


def index_of_mask(mask: Mask, shape: MaskShape, block: tuple[int, int], target: gpu.Gpu) -> BlockIndex:
    """The index of a mask that holds arrays on the device of `target`.

    An index of another mask than `evaluated_source` reads in blocks needs, for a time, a byte for each element.
    """
    mask, xp = mask.resolve(shape), mask_namespace(mask)
    if 0 in (shape.num_batch, *shape[1:]):
        empty = BlockIndex.from_mask(Band(), block=block, **shape._asdict())
        return empty.to(lambda array: xp.zeros(array.shape, dtype=array.dtype))
    source, arrays = evaluated_source(mask, shape, block)
    key = "list", target, target.device, *_LAYOUT(source)
    make = CALLS.get(key)
    if make is None:
        make = ListMaker(source, target)
        CALLS.put(key, make)
    lists = make([target.mask_address(array) for array in arrays], target.stream())
    lo, hi = arrays[1:] if source.is_whole and source.given_rows else (None, None)
    return _of_arrays(source, lists, lo, hi)


def _whole(kept: Array, mask: Mask, block: tuple[int, int]) -> Mask:
    pattern = BlockPattern(kept, block)
    return pattern if mask == Band() else pattern & mask


def index_key(device: int, kept: Array, mask: Mask, shape: MaskShape, block: tuple[int, int]) -> Hashable:
    """Key of how an index is made, without the blocks chosen; None where the contents of the mask may change."""
    try:
        return "index", device, tuple(kept.shape), tuple(kept.strides), content(mask), shape, block
    except TypeError:
        return None


def maker_of(kept: Array, mask: Mask, shape: MaskShape, block: tuple[int, int]) -> IndexMaker | None:
    """Return the maker of indices of blocks that lie as these do; None where the kernels do not serve them."""
    key = index_key(nvrtc.current_device()[1], kept, mask, shape, block)
    maker = None if key is None else _maker(key, _whole(kept, mask, block), shape, block)
    assert not isinstance(maker, IntervalIndexMaker)
    return maker


def _maker(key: Hashable, mask: Mask, shape: MaskShape, block: tuple[int, int]) -> _Maker | None:
    """The maker of indices of masks that lie as one does, from the cache; None where the kernels do not serve them."""
    cached: tuple[_Maker | None] | None = CALLS.get(key)
    if cached is None:
        cached = (_new_maker(mask.resolve(shape), shape, block),)
        CALLS.put(key, cached)
    return cached[0]


def _new_maker(mask: Mask, shape: MaskShape, block: tuple[int, int]) -> _Maker | None:
    """The maker of indices of resolved masks that lie as one does."""
    target, found = gpu.current_target(), ListSource.of(mask, shape, block)
    if found is not None:
        gpu.compile_kernels(LIST_SPECS.values(), target)
        return IndexMaker(found[0], target)
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
