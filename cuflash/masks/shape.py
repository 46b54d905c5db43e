"""The shape for which a mask is resolved, and the limits on lengths of block lists and kernels."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple, TypeAlias, TypeVar

from ..arrays import describe, int_reasons, is_int
from ..errors import UnsupportedProblem, refuse
from ..keywords import explains_keywords

BlockSize: TypeAlias = int | tuple[int, int]  # the side of a square block, or (block_q, block_kv)

_Mask = TypeVar("_Mask")
MAX_SEQLEN = 1 << 30  # the sum of two lengths, or of a length and a tile, fits int32


class _Extents(NamedTuple):
    batch: tuple[int, ...]
    num_heads: int
    seqlen_q: int
    seqlen_kv: int


@explains_keywords
class MaskShape(_Extents):
    """The shape for which a mask is resolved: leading axes, query heads and the two lengths.

    Parameters
    ----------
    batch : tuple of int
        Extents of the axes before the heads.
    num_heads : int
        Number of query heads.
    seqlen_q, seqlen_kv : int
        Lengths of queries and keys, in tokens.

    Examples
    --------
    >>> MaskShape((2, 3), 8, 128, 256).num_batch
    6
    """

    __slots__ = ()

    def __new__(cls, batch: tuple[int, ...], num_heads: int, seqlen_q: int, seqlen_kv: int) -> MaskShape:
        reasons: list[str] = []
        is_tuple = isinstance(batch, (tuple, list))
        if not is_tuple:
            reasons.append(f"batch must be a tuple of ints, the extents of the leading axes; got {describe(batch)}")
        extents = {f"batch[{axis}]": extent for axis, extent in enumerate(batch if is_tuple else ())}
        extents |= {"num_heads": num_heads, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv}
        refuse(reasons + int_reasons(0, **extents))
        *leading, num_heads, seqlen_q, seqlen_kv = map(int, extents.values())
        return super().__new__(cls, tuple(leading), num_heads, seqlen_q, seqlen_kv)

    @property
    def num_batch(self) -> int:
        return prod(self.batch)


def missing_axes(name: str, shape: tuple[int, ...], scores: tuple[int, ...]) -> str:
    """Return advice for an array that does not broadcast to the scores: how to add the missing axes.

    Parameters
    ----------
    name : str
        The array's name in messages.
    shape : tuple of int
        The array's shape.
    scores : tuple of int
        (*batch, num_heads, seqlen_q, seqlen_kv), or only the two lengths.

    Returns
    -------
    str
        The end of an error message; empty if no rearrangement makes the array broadcast.

    Examples
    --------
    >>> missing_axes("bias", (2, 50, 50), (2, 8, 50, 50))
    ': an axis of heads is missing, write bias[:, None]'
    """
    num_batch, num_axes, batch = len(scores) - 3, len(shape), ":" if len(scores) == 4 else "..."
    lengths = ", or masks.Lengths(kv=lengths)" if name == "mask" else ""
    ways = []
    if num_batch > 0 and num_axes == num_batch + 1:
        padding = (*shape[:-1], 1, 1, shape[-1])
        ways.append((f"for padding of shape (batch, seqlen_kv) write {name}[{batch}, None, None, :]{lengths}", padding))
        of_queries = (*shape[:-1], 1, shape[-1], 1)
        ways.append((f"for a shape (batch, seqlen_q) write {name}[{batch}, None, :, None]", of_queries))
    if num_axes == 2 and num_batch >= 0:
        ways.append((f"for one row of each head write {name}[:, None, :]", (shape[0], 1, shape[1])))
    if num_batch > 0 and num_axes == num_batch + 2:
        index = ":, None" if num_batch == 1 else "..., None, :, :"
        ways.append((f"an axis of heads is missing, write {name}[{index}]", (*shape[:-2], 1, *shape[-2:])))
        ways.append((f"an axis of queries is missing, write {name}[..., None, :]", (*shape[:-1], 1, shape[-1])))
    if num_axes > 1:
        turned = (*shape[:-2], shape[-1], shape[-2])
        ways.append((f"queries come before keys, write {name}.swapaxes(-1, -2)", turned))
    return next((f": {fix}" for fix, result in ways if broadcasts_to(result, scores)), "")


def broadcasts_to(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """True if an array of a shape broadcasts to another shape by NumPy's rules."""
    return len(shape) <= len(wanted) and all(have in (1, want) for have, want in zip(shape[::-1], wanted[::-1]))


def length_reasons(shape: MaskShape) -> list[str]:
    """Return the reasons why block lists and kernels, which use int32, cannot handle these lengths."""
    instead = {
        "seqlen_q": "call once for each part of the queries",
        "seqlen_kv": "attend to each part of the keys, and cuflash.merge the results",
    }
    return [
        f"{name} must be at most {MAX_SEQLEN}; got {getattr(shape, name)}: {advice}"
        for name, advice in instead.items()
        if getattr(shape, name) > MAX_SEQLEN
    ]


def count_reasons(**lengths: int) -> list[str]:
    """Return the reasons why lengths, or numbers of heads, are refused."""
    return int_reasons(0, 2**63 - 1, **lengths)


def shape_reasons(shape: MaskShape) -> list[str]:
    """Return the reasons why no array can have a shape: an extent is not less than 2**63."""
    wrong = f"shape's batch must be a tuple of ints from 0 to 2**63 - 1; got {describe(shape.batch)}"
    reasons = [wrong] if any(count_reasons(batch=extent) for extent in shape.batch) else []
    lengths = {"num_heads": shape.num_heads, "seqlen_q": shape.seqlen_q, "seqlen_kv": shape.seqlen_kv}
    return reasons + [f"shape's {reason}" for reason in count_reasons(**lengths)]


def whole_shape(seqlen_q: int, seqlen_kv: int | None, batch: tuple[int, ...], num_heads: int) -> MaskShape:
    """Return the shape with these lengths, batch and heads; refuse one that no array can have."""
    shape = MaskShape(batch, num_heads, seqlen_q, seqlen_q if seqlen_kv is None else seqlen_kv)
    refuse(shape_reasons(shape))
    return shape


def block_pair(block: BlockSize) -> tuple[int, int]:
    """Return (block_q, block_kv) from one int or two.

    >>> block_pair(64), block_pair((64, 128))
    ((64, 64), (64, 128))
    """
    pair = block if isinstance(block, (tuple, list)) else (block, block)
    if len(pair) != 2 or not all(is_int(side) and 1 <= side < 2**63 for side in pair):
        raise UnsupportedProblem(
            f"block must be an int of at least 1, and less than 2**63, or two of them (block_q, block_kv); got "
            f"{describe(block)}"
        )
    if max(pair) > MAX_SEQLEN:
        raise UnsupportedProblem(f"block must be at most {MAX_SEQLEN}, the longest length; got {describe(block)}")
    return int(pair[0]), int(pair[1])


def once_checked(inherited: Callable[[_Mask, MaskShape], _Mask]) -> Callable[[_Mask, MaskShape], _Mask]:
    """Return a `resolve` method that checks the shape with the inherited `resolve`, and returns the mask unchanged."""

    def resolve(self: _Mask, shape: MaskShape) -> _Mask:
        inherited(self, shape)
        return self

    return resolve
