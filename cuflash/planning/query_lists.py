"""The lists of blocks that queries choose, in arrays on a device: those of a mask, or of a block index."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..blocks.index import BlockIndex
from ..blocks.index_mask import IndexMask
from ..layouts import dense_strides
from ..masks._chosen import ChosenBlocks, ResolvedChosen
from ..masks.base import Mask
from ..masks.coordinates import LeadingArray
from ..masks.shape import MaskShape
from .interval_kernels import moving_strides
from .launches import Value, over_batch


class QueryLists(NamedTuple):
    """The lists of queries in the arrays that each call passes.

    Attributes
    ----------
    num_lists, num_chosen, block : int
        As in `UnionTiling`.
    varies : bool
        Batch entries have lists of their own.
    blocks : tuple of int
        Strides of the lists in bytes, along batch axes, heads, rows and entries; 0 along broadcast axes.
    itemsize : int
        Bytes of an entry.
    counts : (tuple of int, numpy.dtype) or None
        Strides of the lists' counts in bytes, along batch axes, heads and rows, and their dtype.
    carried : ListSource or None
        The positions of a block index's lists in one array, in which all entries follow each other. `counts` then
        describes the row pointers.
    """

    num_lists: int
    num_chosen: int
    block: int
    varies: bool
    blocks: tuple[int, ...]
    itemsize: int
    counts: tuple[tuple[int, ...], np.dtype[np.generic]] | None
    carried: Any = None

    @classmethod
    def of(cls, mask: Mask, shape: MaskShape) -> QueryLists | None:
        """Return the lists of a resolved `ChosenBlocks` or block index; None if kernels cannot read them."""
        if isinstance(mask, ResolvedChosen):
            return cls._of_chosen(mask.source, shape) if mask.source.sequences is None else None
        return cls._of_index(mask.index, shape) if isinstance(mask, IndexMask) else None

    @classmethod
    def _of_chosen(cls, chosen: ChosenBlocks, shape: MaskShape) -> QueryLists:
        counts = None if chosen.counts is None else LeadingArray.of(chosen.counts, shape.batch, 2).array
        blocks = LeadingArray.of(chosen.blocks, shape.batch, 3).array
        varying = [*blocks.shape[:-3], *(() if counts is None else counts.shape[:-2])]
        return cls(
            num_lists=chosen.num_lists, num_chosen=int(blocks.shape[-1]), block=chosen.block,
            varies=any(extent > 1 for extent in varying), blocks=moving_strides(blocks), itemsize=blocks.dtype.itemsize,
            counts=None if counts is None else (moving_strides(counts), np.dtype(counts.dtype)),
        )  # fmt: skip

    @classmethod
    def _of_index(cls, index: BlockIndex, shape: MaskShape) -> QueryLists | None:
        carried = index._carried
        if carried is None or not carried.source.is_whole or index.block[0] != 1:
            return None
        entry, varies = np.dtype(np.int32), index.batch > 1
        steps = dense_strides((*(shape.batch if varies else ()), index.num_heads, shape.seqlen_q))
        starts = tuple(entry.itemsize * step for step in steps)
        return cls(
            num_lists=index.num_heads, num_chosen=index.num_kv_blocks, block=index.block[1], varies=varies,
            blocks=(0, 0, entry.itemsize), itemsize=entry.itemsize, counts=(starts, entry), carried=carried.source,
        )  # fmt: skip

    @property
    def array_names(self) -> tuple[str, ...]:
        """Fields of the record for the arrays that each call passes."""
        return ("blocks",) if self.counts is None or self.carried is not None else ("blocks", "counts")

    @property
    def starts(self) -> dict[str, int]:
        """Offsets in bytes of the fields for a block index, which all refer to the array "blocks"."""
        if self.carried is None:
            return {}
        offsets = self.carried.offsets
        return {"blocks": offsets["kv_blocks"], "counts": offsets["row_pointers"]}

    @property
    def numbers(self) -> dict[str, Value]:
        """The numbers of these lists in the kernel's record."""
        *of_batch, head, row, entry = self.blocks
        numbers: dict[str, Value] = {
            "blocks_batch_strides": over_batch(of_batch, 0), "blocks_head_stride": head, "blocks_row_stride": row,
            "blocks_stride": entry, "blocks_itemsize": self.itemsize, "num_heads": self.num_lists,
            "num_chosen": self.num_chosen, "block": self.block, "has_starts": self.carried is not None,
        }  # fmt: skip
        if self.counts is None:
            return numbers
        (*of_batch, head, row), dtype = self.counts
        return numbers | {
            "counts_batch_strides": over_batch(of_batch, 0), "counts_head_stride": head, "counts_row_stride": row,
            "counts_itemsize": dtype.itemsize, "is_counts_signed": dtype.kind == "i",
        }  # fmt: skip
