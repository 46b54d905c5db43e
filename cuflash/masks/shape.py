"""The shape that a mask is resolved for, and the lengths that lists and kernels can count."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ..arrays import describe, is_int, whole_number

MAX_SEQLEN = 1 << 30  # the sum of two lengths, or of a length and a tile, fits int32


class _Extents(NamedTuple):
    batch: tuple[int, ...]
    num_heads: int
    seqlen_q: int
    seqlen_kv: int


class MaskShape(_Extents):
    """The shape that a mask is resolved for: leading axes, query heads and the two lengths.

    Parameters
    ----------
    batch : tuple of int
        Extents of the axes before the heads.
    num_heads : int
        Query heads.
    seqlen_q, seqlen_kv : int
        Lengths of queries and keys, in tokens.

    Examples
    --------
    >>> MaskShape((2, 3), 8, 128, 256).num_batch
    6
    """

    __slots__ = ()

    def __new__(cls, batch: tuple[int, ...], num_heads: int, seqlen_q: int, seqlen_kv: int) -> MaskShape:
        return super().__new__(
            cls,
            tuple(whole_number("an extent of batch", extent, 0) for extent in batch),
            whole_number("num_heads", num_heads, 0),
            whole_number("seqlen_q", seqlen_q, 0),
            whole_number("seqlen_kv", seqlen_kv, 0),
        )

    @property
    def num_batch(self) -> int:
        return prod(self.batch)


def length_reasons(shape: MaskShape) -> list[str]:
    """Why lists and kernels, which count in int32, do not take these lengths; a mask itself takes any."""
    instead = {
        "seqlen_q": "call once for each part of the queries",
        "seqlen_kv": "attend to each part of the keys, and cuflash.merge the results",
    }
    return [
        f"{name} must be at most {MAX_SEQLEN}; got {getattr(shape, name)}: {advice}"
        for name, advice in instead.items()
        if getattr(shape, name) > MAX_SEQLEN
    ]


def count_reasons(**lengths: object) -> list[str]:
    """Why lengths, or numbers of heads, are refused."""
    return [
        f"{name} must be an int from 0 to 2**63 - 1; got {describe(length)}"
        for name, length in lengths.items()
        if not (is_int(length) and 0 <= length < 2**63)  # type: ignore[operator]
    ]


def shape_reasons(shape: Any) -> list[str]:
    """Why something is no shape that a mask can be resolved for."""
    if not isinstance(shape, MaskShape):
        return [f"shape must be a MaskShape(batch, num_heads, seqlen_q, seqlen_kv); got {describe(shape)}"]
    batch = shape.batch if isinstance(shape.batch, tuple) else (None,)
    told = f"shape's batch must be a tuple of ints from 0 to 2**63 - 1; got {describe(shape.batch)}"
    reasons = [told] if any(count_reasons(batch=extent) for extent in batch) else []
    lengths = {"num_heads": shape.num_heads, "seqlen_q": shape.seqlen_q, "seqlen_kv": shape.seqlen_kv}
    return reasons + [f"shape's {reason}" for reason in count_reasons(**lengths)]
