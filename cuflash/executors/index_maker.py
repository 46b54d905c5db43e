"""Makes block indices on the current CUDA device by the kernels of `ListMaker`, without a wait."""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter
from typing import Any

from ..arrays import Array
from ..blocks import index as indices
from ..blocks.carried import CarriedLists
from ..blocks.index import BlockIndex as BlockIndex
from ..compiler import nvrtc
from ..masks.base import Band, Mask
from ..masks.block_pattern import BlockPattern
from ..masks.content import content, mask_namespace
from ..masks.shape import MaskShape
from ..planning._call_cache import CALLS
from ..planning.list_kernels import LIST_SPECS, ListSource
from . import gpu
from .evaluation import evaluated_source
from .launch import LaunchTarget
from .list_maker import ListMaker


# What kernels of lists depend on, if each call hands over the row intervals.
_LAYOUT = attrgetter("strides", "element", "is_whole", "given_rows", "shape", "block", "batch", "num_heads")


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


def index_of(kept: Array | None, mask: Mask, shape: MaskShape, block: tuple[int, int]) -> BlockIndex:
    """An index, on the current device, of chosen blocks whose elements a mask allows.

    Parameters
    ----------
    kept : CuPy bool array [..., num_q_blocks, num_kv_blocks], or None
        As `BlockPattern` takes it; None for all blocks of a mask that holds arrays.
    mask : Mask
        A resolved one; `Band()` allows everything.
    shape : MaskShape
    block : (int, int)
        Sides of the blocks.

    Returns
    -------
    BlockIndex
        One that carries lists if the mask of the chosen blocks holds no arrays.

    Raises
    ------
    RuntimeError
        The stream is captured, and the kernels are not compiled yet.
    """
    if kept is None:
        gpu.compile_kernels(LIST_SPECS.values(), gpu.current_target())
        return index_of_mask(mask, shape, block, gpu.current_target())
    maker = maker_of(kept, mask, shape, block)
    if maker is None:
        return BlockIndex.from_mask(_whole(kept, mask, block), block=block, **shape._asdict())
    target = gpu.current_target()
    stream = target.stream()
    if stream.is_capturing():
        gpu.hold(maker.lists)
    return maker(target.mask_address(kept), stream)


def index_of_mask(mask: Mask, shape: MaskShape, block: tuple[int, int], target: gpu.Gpu) -> BlockIndex:
    """The index of a resolved mask that holds arrays on the device of `target`.

    An index of another mask than `evaluated_source` reads in blocks needs, for a time, a byte for each element.
    """
    xp = mask_namespace(mask)
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
    if key is None:
        return None
    cached = CALLS.get(key)
    if cached is not None:
        (known,) = cached
        return known  # type: ignore[no-any-return]
    found = ListSource.of(_whole(kept, mask, block).resolve(shape), shape, block)
    maker = None
    if found is not None:
        gpu.compile_kernels(LIST_SPECS.values(), gpu.current_target())
        maker = IndexMaker(found[0], gpu.current_target())
    CALLS.put(key, (maker,))
    return maker


indices.make_on_device = index_of
