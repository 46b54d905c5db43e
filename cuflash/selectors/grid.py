"""The blocks of a selection: which of them a mask allows, and the index that chosen ones make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import Array, accumulator_dtype, describe, namespace, require_arrays
from ..blocks.index import BlockIndex
from ..calls._call import Call
from ..errors import UnsupportedProblem, collecting
from ..executors._layout_key import layout_key
from ..executors.index_maker import index_of
from ..executors.selecting import chosen
from ..masks._chosen import Stairs
from ..masks.base import Band, Mask
from ..masks.block_pattern import BlockPattern
from ..masks.shape import MaskShape, block_pair
from ..planning._call_cache import CALLS
from ..planning.options import Options
from ..planning.problem import reasons_without_v
from ..planning.selection_kernels import ChoiceRule
from ..plans import as_arrays
from .budget import Budget, Diagonal, Forced, choose


@dataclass(frozen=True, eq=False)
class Grid:
    """The blocks of q and k, and the masks of a call."""

    q: Array
    k: Array
    shape: MaskShape
    block: tuple[int, int]
    mask: Mask
    is_causal: bool
    offset: int  # query i meets key i + offset on the diagonal
    has_own_mask: bool
    scale: float
    has_heads: bool

    @classmethod
    def of(
        cls, q: Array, k: Array, block: Any, budgets: dict[str, Any], forced: Any, causal: Any, mask: Any, window: Any,
        scale: Any, reasons: Sequence[str] = (),
    ) -> Grid:  # fmt: skip
        """Check the arguments of a selector, which others of its arguments may break by `reasons`.

        Raises
        ------
        TypeError
            q or k is not an array of a known kind, or `mask` stands for no mask.
        UnsupportedProblem
            An argument breaks its rule; all reasons at once.
        """
        reasons = list(reasons)
        for name, budget in budgets.items():
            if not isinstance(budget, Budget):
                reasons.append(f"{name} must be a Budget; got {describe(budget)}: selectors.Budget(top_k=8) is one")
        if not isinstance(forced, Forced):
            reasons.append(f"forced must be a Forced; got {describe(forced)}: selectors.Forced(sink=1) is one")
        options = Options(mask, causal, window, scale=scale)
        key = None if reasons else options.key(layout_key(q, k), "grid", repr(block))
        known = CALLS.get(key)
        if known is not None:
            return cls(q, k, *known)
        q, k = as_arrays({"q": q, "k": k}).values()
        require_arrays({"q": q, "k": k})
        if namespace(q) is not namespace(k):
            raise UnsupportedProblem([*reasons, "q and k must be of one kind: copy one of them explicitly"])
        sides, call, found = (1, 1), None, list[str]()
        with collecting(reasons):
            sides = block_pair(block)
        v = k[..., :1] if k.ndim >= 2 else k
        with collecting(found):
            call = Call.of(q, k, v, options)
        reasons += reasons_without_v(found, q, k, (q, k, v))
        if reasons or call is None:
            raise UnsupportedProblem(reasons)
        problem, shape = call.problem, call.problem.mask_shape
        offset = shape.seqlen_kv - shape.seqlen_q if isinstance(causal, str) and causal == "bottom_right" else 0
        is_causal = causal is not False and bool(causal)
        facts = (
            shape, sides, call.mask, is_causal, offset, mask is not None or window is not None,
            problem.softmax_scale, problem.has_heads,
        )  # fmt: skip
        if key is not None:
            CALLS.put(key, facts)
        return cls(q, k, *facts)

    @property
    def xp(self) -> Any:
        return namespace(self.q)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        return -(-self.shape.seqlen_q // self.block[0]), -(-self.shape.seqlen_kv // self.block[1])

    @property
    def heads(self) -> tuple[int, ...]:
        """The leading axes of scores: batch and query heads, no axis for q of two axes."""
        return (*self.shape.batch, self.shape.num_heads) if self.has_heads else ()

    @property
    def is_masked(self) -> bool:
        """Return whether estimates have to look at the mask: at one of the caller's, or where rows attend nothing."""
        num_batch, num_heads = self.shape.num_batch, self.shape.num_heads
        seqlen_q, seqlen_kv = self.shape.seqlen_q, self.shape.seqlen_kv
        if 0 in (num_batch, num_heads, seqlen_q, seqlen_kv):
            return False
        return self.has_own_mask or self.is_causal and (self.offset < 0 or seqlen_q + self.offset < seqlen_kv)

    def leading(self, x: Array) -> Array:
        """An array [batch or 1, num_heads or 1, ...] of a mask, with the leading axes of scores."""
        batch = self.shape.batch if x.shape[0] > 1 else (1,) * len(self.shape.batch)
        return x.reshape((*batch, *x.shape[1:]) if self.has_heads else x.shape[2:])

    def of_query_heads(self, of_kv_heads: Array) -> Array:
        """Rows of key/value heads [..., kv_heads, n, dim] for each query head that reads them."""
        if not self.has_heads or of_kv_heads.shape[-3] == self.shape.num_heads:
            return of_kv_heads
        return self.xp.repeat(of_kv_heads, self.shape.num_heads // max(of_kv_heads.shape[-3], 1), axis=-3)

    @cached_property
    def diagonal(self) -> Diagonal:
        """Return the positions at which the diagonal crosses the blocks."""
        return Diagonal.of(self.xp, (self.shape.seqlen_q, self.shape.seqlen_kv), self.block, self.offset)

    def eligible(self) -> Any:
        """Return which blocks hold an element that the masks allow, bool, broadcasts against [*heads, rows, columns].

        None for all of them.
        """
        xp = self.xp
        if not self.has_own_mask:
            return self.diagonal.is_met if self.is_causal else None
        index = BlockIndex.from_mask(self.mask, block=self.block, **self.shape._asdict())
        return self.leading(xp.asarray(index.states() != 0))

    def stairs(self, step_q: int, step_kv: int, needed_keys: int = 1) -> Mask | None:
        """The causal mask between groups of so many queries and of so many keys; None without one.

        A group of queries sees the groups of keys of which its last query sees the first `needed_keys`.
        """
        return Stairs(step_q, step_kv, step_q + self.offset - needed_keys) if self.is_causal else None

    def rule(self, budget: Budget, forced: Forced) -> ChoiceRule:
        """Everything that decides which blocks of a row are kept but their scores and a mask of the caller's."""
        return ChoiceRule(
            lengths=(self.shape.seqlen_q, self.shape.seqlen_kv), block=self.block, offset=self.offset,
            is_causal=self.is_causal and not self.has_own_mask, count=max(budget.top_k or 0, budget.min_blocks),
            mass=float(budget.part or 0), threshold=None if budget.threshold is None else float(budget.threshold),
            num_sinks=forced.sink, num_local=forced.local, has_diagonal=bool(forced.diagonal),
        )  # fmt: skip

    def chosen(
        self,
        scores: Array,
        shares: Array | None,
        budget: Budget,
        forced: Forced,
        extra: Any = None,
        allowed: Any = None,
    ) -> Array:
        """The blocks that a budget keeps, bool of the scores' shape.

        `shares` None counts all blocks alike. `extra` are further blocks that are forced, and `allowed` those that may
        be kept, where fewer may than the masks allow. On a device a kernel chooses.
        """
        if self.xp.__name__ == "cupy":
            allowed = self.eligible() if allowed is None and self.has_own_mask else allowed
            counted = None if budget.density is not None else shares
            return chosen(self.rule(budget, forced), scores, counted, allowed, extra)
        shares = self.xp.ones(scores.shape, dtype=np.float32) if shares is None else shares
        must = self.forced(forced)
        allowed = self.eligible() if allowed is None else allowed
        return choose(scores, shares, allowed, must if extra is None else must | extra, budget)

    def forced(self, forced: Forced) -> Array:
        """The blocks that must be kept where they are eligible, bool [rows, columns]."""
        return self.diagonal.forced(forced)

    def index(self, kept: Array) -> BlockIndex:
        """An index of the blocks kept, bool [*heads, rows, columns], whose elements the masks allow."""
        if self.xp.__name__ == "cupy":
            return index_of(kept, self.mask, self.shape, self.block)
        pattern = BlockPattern(kept, self.block)
        whole = pattern if self.mask == Band() else pattern & self.mask
        return BlockIndex.from_mask(whole, block=self.block, **self.shape._asdict())


def block_means(x: Array, side: int) -> Array:
    """Means of rows over blocks of a side, [..., num_blocks, dim], in the accumulator's dtype."""
    xp, length, dtype = namespace(x), x.shape[-2], accumulator_dtype(x.dtype)
    num_blocks = -(-length // side)
    blocks = padded(x, num_blocks * side).reshape(*x.shape[:-2], num_blocks, side, x.shape[-1])
    sums = blocks.sum(axis=-2, dtype=dtype)
    if length % side == 0:
        return sums / side
    counts = xp.minimum(length - xp.arange(0, num_blocks * side, side), side).astype(dtype)
    return sums / counts[:, None]


def padded(x: Array, length: int) -> Array:
    """Rows with rows of zeros behind them, as many as make a length; the same array where none is missing."""
    if x.shape[-2] == length:
        return x
    made = namespace(x).zeros((*x.shape[:-2], length, x.shape[-1]), dtype=x.dtype)
    made[..., : x.shape[-2], :] = x
    return made


def of_strides(x: Array, stride: int, *, turned: bool) -> Array:
    """Join each run of `stride` rows of x to one row: [..., n, d] becomes [..., n / stride, stride d].

    `turned` rows are joined from the last of a run to the first, so that the product of a turned row of q and a row of
    k is the sum of the scores on an antidiagonal.
    """
    groups = x.reshape(*x.shape[:-2], x.shape[-2] // stride, stride, x.shape[-1])
    groups = groups[..., ::-1, :] if turned else groups
    return groups.reshape(*groups.shape[:-2], stride * x.shape[-1])
