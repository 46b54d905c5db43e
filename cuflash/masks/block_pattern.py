"""Masks of whole blocks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..arrays import Array, describe, fix_of_numbers, is_array, is_sparse, namespace
from ..errors import UnsupportedProblem, collecting, refuse
from ..keywords import explains_keywords
from .base import Mask
from .content import DeviceForm
from .block_set import BlockGrid, BlockSet, sorted_places
from .coordinates import LeadingArray, leading_reasons, widened
from .fields import take_arrays
from .shape import MaskShape, block_pair


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
class BlockPattern(Mask):
    """A mask that keeps or drops whole blocks.

    Parameters
    ----------
    blocks : bool array [..., num_q_blocks, num_kv_blocks], or 2-D scipy.sparse array
        A block is kept if its element is True, or stored and nonzero. The axes before the last two broadcast over
        (*batch, num_heads).
    block : int or (int, int)
        Size of a block in tokens, or block_q and block_kv. The length may cut off the last block of either side.

    Raises
    ------
    UnsupportedProblem
        `blocks` is neither a boolean array nor a scipy.sparse array, has fewer than two axes, or `block` is not a size;
        the error lists all reasons. Calls, and `resolve`, raise it if the blocks do not fit the lengths.

    Examples
    --------
    >>> import numpy as np
    >>> BlockPattern(np.array([[1, 0], [1, 1]], bool), block=2).toarray(3, 4).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 1]])
    """

    blocks: Array
    block: Any  # (block_q, block_kv) after construction

    def __post_init__(self) -> None:
        reasons, argument = list[str](), self.blocks
        take_arrays(self, {"blocks": "blocks"}, np.bool_)
        with collecting(reasons):
            object.__setattr__(self, "block", block_pair(self.block))
        if is_sparse(self.blocks):
            if self.blocks.ndim != 2:
                reasons.append(f"blocks must have two axes as a scipy.sparse array; got shape {self.blocks.shape}")
        elif not (is_array(self.blocks) and self.blocks.ndim >= 2 and self.blocks.dtype == np.bool_):
            is_numbers = is_array(self.blocks) and self.blocks.dtype.kind in "iuf"
            fix = f": {fix_of_numbers('blocks', argument, self.blocks.dtype)}" if is_numbers else ""
            reasons.append(
                f"blocks must be a boolean array (..., num_q_blocks, num_kv_blocks) or a scipy.sparse array; "
                f"got {describe(self.blocks)}{fix}"
            )
        refuse(reasons)

    @property
    def _natural_block(self) -> tuple[int, int]:
        block_q, block_kv = self.block
        return block_q, block_kv

    @property
    def _own_lengths(self) -> tuple[int | None, int | None]:
        q, kv = (int(extent) * side for extent, side in zip(self.blocks.shape[-2:], self.block))
        return q, kv

    def _require_fit(self, shape: MaskShape) -> None:
        """Refuse a shape whose grid of blocks differs from that of the mask.

        Parameters
        ----------
        shape : MaskShape
            Batch, heads and lengths of the scores.

        Raises
        ------
        UnsupportedProblem
            The blocks have a different shape.

        Examples
        --------
        >>> import numpy as np
        >>> from cuflash.masks.shape import MaskShape
        >>> BlockPattern(np.eye(2, dtype=bool), 4)._require_fit(MaskShape((), 1, 8, 8))
        """
        grid = (-(-shape.seqlen_q // self.block[0]), -(-shape.seqlen_kv // self.block[1]))
        reasons = []
        if tuple(self.blocks.shape[-2:]) != grid:
            reasons.append(
                f"blocks must have shape (..., {grid[0]}, {grid[1]}) for lengths ({shape.seqlen_q}, {shape.seqlen_kv}) "
                f"in blocks of {self.block}; got {tuple(self.blocks.shape)}"
            )
        leading = tuple(self.blocks.shape[:-2])
        reasons.extend(leading_reasons("blocks", leading, (*shape.batch, shape.num_heads), has_heads=True))
        refuse(reasons)

    @property
    def _device_form(self) -> DeviceForm | None:
        return DeviceForm((self.blocks,), (self.block,))

    def resolve(self, shape: MaskShape) -> Mask:
        self._require_fit(shape)
        grid, leading = tuple(self.blocks.shape[-2:]), tuple(self.blocks.shape[:-2])
        if is_sparse(self.blocks):
            return BlockSet((1, 1, *grid), self.block, *sorted_places(self.blocks), self.block)
        if namespace(self.blocks) is not np:
            return BlockGrid(LeadingArray.of(self.blocks, shape.batch, 3), self.block, self.block)
        padded = self.blocks.reshape((1,) * (len(shape.batch) + 1 - len(leading)) + tuple(self.blocks.shape))
        if any(extent > 1 for extent in padded.shape[:-3]):
            padded = np.broadcast_to(padded, (*shape.batch, *padded.shape[-3:]))
        flat = padded.reshape(prod(padded.shape[:-3]), *padded.shape[-3:])
        keys = np.flatnonzero(flat)
        return BlockSet(flat.shape, self.block, keys, np.ones(len(keys), bool), self.block)

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        if len(self.blocks.shape) > 2 or is_sparse(self.blocks):
            raise UnsupportedProblem(
                "BlockPattern with leading axes or a sparse array depends on the shape: call .resolve(shape) first"
            )
        return self.blocks[widened(i) // self.block[0], widened(j) // self.block[1]]
