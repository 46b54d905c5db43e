"""Makes block indices on the current CUDA device by the kernels of `ListMaker`, without a wait."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

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
from ..planning.list_kernels import LIST_SPECS, ListSource
from . import gpu
from ._layout_key import layout_key
from .evaluation import evaluated_source
from .launch import LaunchTarget
from .list_maker import ListMaker


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
            self._facts |= self.lists.intervals

    def __call__(self, mask: int, stream: Any) -> BlockIndex:
        """The index of the mask at an address, once the stream has come so far."""
        return BlockIndex._of_lists(CarriedLists(self.lists((mask,), stream), self._source), **self._facts)


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
        maker = maker_of(kept, mask, shape, block)
        if maker is None:
            return BlockIndex.from_mask(_whole(kept, mask, block), block=block, **shape._asdict())
        return _made(maker, kept)
    contents = mask_contents(mask, layout_key)
    maker = None if key is None or contents is None else _maker(key, mask, shape, block)
    if contents is None or maker is None:
        gpu.compile_kernels(LIST_SPECS.values(), gpu.current_target())
        return index_of_mask(mask, shape, block, gpu.current_target())
    return _made(maker, *contents.arrays)


def repeated_index(mask: Any, arguments: str) -> tuple[Hashable, BlockIndex | None]:
    """The key of an index of a mask, and the index if one of a mask that lies alike was made with these arguments.

    Nothing is checked: equal keys mean that the call was made before. The key is None where calls are not remembered.
    """
    contents = mask_contents(mask, layout_key)
    if contents is None:
        return None, None
    key = "index", contents.key, arguments
    cached: tuple[IndexMaker | None] | None = CALLS.get(key)
    if cached is None or cached[0] is None:
        return key, None
    return key, _made(cached[0], *contents.arrays)


def _made(maker: IndexMaker, array: Array) -> BlockIndex:
    """The index of chosen blocks, or of a mask, in an array on the current device."""
    target = gpu.current_target()
    stream = target.current_stream()
    if stream.is_capturing():
        gpu.hold(maker.lists)
    return maker(target.mask_address(array), stream)


def index_of_mask(mask: Mask, shape: MaskShape, block: tuple[int, int], target: gpu.Gpu) -> BlockIndex:
    """The index of a mask that holds arrays on the device of `target`.

    An index of another mask than `evaluated_source` reads in blocks needs, for a time, a byte for each element.
    """
    mask, xp = mask.resolve(shape), mask_namespace(mask)
    if 0 in (shape.num_batch, *shape[1:]):
        empty = BlockIndex.from_mask(Band(), block=block, **shape._asdict())
        return empty.to(lambda array: xp.zeros(array.shape, dtype=array.dtype))
    source, arrays = evaluated_source(mask, shape, block)
    lists = ListMaker(source, target)([target.mask_address(array) for array in arrays], target.stream())
    lo, hi = arrays[1:] if source.is_whole and source.given_rows else (None, None)
    index = BlockIndex(
        seqlen_q=shape.seqlen_q, seqlen_kv=shape.seqlen_kv, block=block, batch=source.batch,
        num_heads=source.num_heads, lo=lo, hi=hi, **source.fields_of(lists),
    )  # fmt: skip
    found = source.lists_of(lists)
    vars(index)["_columns"] = found["column_pointers"], found["column_entries"]
    return index


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
    return None if key is None else _maker(key, _whole(kept, mask, block), shape, block)


def _maker(key: Hashable, mask: Mask, shape: MaskShape, block: tuple[int, int]) -> IndexMaker | None:
    """The maker of indices of masks that lie as one does, from the cache; None where the kernels do not serve them."""
    cached: tuple[IndexMaker | None] | None = CALLS.get(key)
    if cached is None:
        target = gpu.current_target()
        found = ListSource.of(mask.resolve(shape), shape, block)
        if found is not None:
            gpu.compile_kernels(LIST_SPECS.values(), target)
        cached = (None if found is None else IndexMaker(found[0], target),)
        CALLS.put(key, cached)
    return cached[0]


indices.find_on_device, indices.make_on_device = repeated_index, index_of
