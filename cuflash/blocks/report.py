"""Numbers that describe a block index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arrays import describe
from ..errors import UnsupportedProblem


@dataclass(frozen=True, kw_only=True)
class IndexReport:
    """The counts of `BlockIndex.report`, summed over the index's batch and heads.

    Examples
    --------
    >>> from cuflash import BlockIndex, masks
    >>> index = BlockIndex.from_mask(masks.Causal(), 4, 4, block=2)
    >>> print(index.report(head_dim=8))
    density             75.0 % of all blocks (1 full + 2 partial of 4)
    elements            10 allowed of 12 visited of 16
    blocks in a row     1 to 2, mean 1.50
    rows without a key  0
    FLOPs               384 forward, 960 backward
    bytes               384 of k and v read, 71 of index
    """

    num_full: int
    num_partial: int
    num_eligible: int
    denominator: str
    elements_visited: int
    elements_allowed: int
    num_elements: int
    row_load: tuple[int, float, int]
    empty_rows: int
    forward_flops: int
    backward_flops: int
    kv_bytes: int
    index_bytes: int

    @property
    def density(self) -> float:
        """Blocks kept over eligible blocks (`denominator` says which those are)."""
        return (self.num_full + self.num_partial) / self.num_eligible if self.num_eligible else 0.0

    @property
    def element_density(self) -> float:
        """Elements allowed over all elements."""
        return self.elements_allowed / self.num_elements if self.num_elements else 0.0

    def __str__(self) -> str:
        least, mean, most = self.row_load
        kept = f"({self.num_full} full + {self.num_partial} partial of {self.num_eligible})"
        return "\n".join(
            [
                f"density             {self.density:.1%} of {self.denominator} {kept}".replace("%", " %"),
                f"elements            {self.elements_allowed} allowed of {self.elements_visited} visited "
                f"of {self.num_elements}",
                f"blocks in a row     {least} to {most}, mean {mean:.2f}",
                f"rows without a key  {self.empty_rows}",
                f"FLOPs               {self.forward_flops} forward, {self.backward_flops} backward",
                f"bytes               {self.kv_bytes} of k and v read, {self.index_bytes} of index",
            ]
        )


def require_same_blocks(index: Any, eligible: Any) -> None:
    """Refuse what is no `BlockIndex` of the same blocks, over which no density can be stated."""
    if not isinstance(eligible, type(index)):
        raise UnsupportedProblem([f"eligible must be a BlockIndex or None; got {describe(eligible)}"])
    here, there = ((*each.shape[2:], *each.block) for each in (index, eligible))
    if here != there:
        of_index, got = (f"{each[:2]} in blocks of {each[2:]}" for each in (here, there))
        raise UnsupportedProblem([f"eligible must be for lengths {of_index}; got {got}"])
