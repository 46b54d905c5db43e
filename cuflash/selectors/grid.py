"""The grid of blocks of a selection: eligible and forced blocks, and the index of the chosen ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..arrays import accumulator_dtype, Array, describe, Namespace, namespace, require_arrays
from ..blocks.index import BlockIndex
from ..calls._call import Call
from ..errors import UnsupportedProblem, collecting
from ..executors._layout_key import layout_key
from ..executors.index_maker import index_of
from ..executors.selecting import chosen
from ..masks._chosen import Stairs
from ..masks.base import Band, Mask
from ..masks.block_pattern import BlockPattern
from ..masks.shape import block_pair, BlockSize, MaskShape
from ..planning._call_cache import CALLS
from ..planning.options import Causality, MaskLike, Options, Window
from ..planning.problem import reasons_without_v
from ..planning.selection_kernels import ChoiceRule
from ..plans.conversion import as_arrays
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
    offset: int  # the diagonal aligns query i with key i + offset
    has_own_mask: bool
    scale: float
    has_heads: bool
    first_query: int = 0  # position of the first query, if the grid has some rows of another grid

    @classmethod
    def of(
        cls, q: Array, k: Array, block: BlockSize, budgets: dict[str, Budget], forced: Forced, causal: Causality,
        mask: MaskLike | None, window: Window | None, scale: float | None, reasons: Sequence[str] = (),
    ) -> Grid:  # fmt: skip
        """Check the arguments of a selector; `reasons` are the reasons to refuse its other arguments.

        Raises
        ------
        TypeError
            q or k is not an array of a supported library, or `mask` cannot be converted to a mask.
        UnsupportedProblem
            An argument breaks its rule; the error lists all reasons.
        """
        reasons = list(reasons)
        for name, budget in budgets.items():
            if not isinstance(budget, Budget):
                reasons.append(f"{name} must be a Budget; got {describe(budget)}: write selectors.Budget(top_k=8)")
        if not isinstance(forced, Forced):
            reasons.append(f"forced must be a Forced; got {describe(forced)}: write selectors.Forced(sink=1)")
        options = Options(mask, causal, window, scale=scale)
        key = None if reasons else options.key(layout_key(q, k), "grid", repr(block))
        known = CALLS.get(key)
        if known is not None:
            return cls(q, k, *known)
        q, k = as_arrays({"q": q, "k": k}).values()
        require_arrays({"q": q, "k": k})
        if namespace(q) is not namespace(k):
            raise UnsupportedProblem([*reasons, "q and k must be of one kind: copy one of them explicitly"])
        sides, call, of_call = (1, 1), None, list[str]()
        with collecting(reasons):
            sides = block_pair(block)
        v = k[..., :1] if k.ndim >= 2 else k
        with collecting(of_call):
            call = Call.of(q, k, v, options)
        reasons += reasons_without_v(of_call, q, k, (q, k, v))
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
    def xp(self) -> Namespace:
        return namespace(self.q)

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of rows and columns of blocks."""
        return -(-self.shape.seqlen_q // self.block[0]), -(-self.shape.seqlen_kv // self.block[1])

    @property
    def heads(self) -> tuple[int, ...]:
        """The leading axes of scores: batch and query heads, or none if q has two axes."""
        return (*self.shape.batch, self.shape.num_heads) if self.has_heads else ()

    @property
    def is_empty(self) -> bool:
        """True if there are no scores."""
        return 0 in (self.shape.num_batch, self.shape.num_heads, self.shape.seqlen_q, self.shape.seqlen_kv)

    @property
    def is_masked(self) -> bool:
        """True if estimates depend on the mask: on the caller's, or on a causal mask with empty rows or unused keys."""
        is_cut = self.offset < 0 or self.shape.seqlen_q + self.offset < self.shape.seqlen_kv
        return not self.is_empty and (self.has_own_mask or self.is_causal and is_cut)

    def leading(self, x: Array) -> Array:
        """Reshape an array [batch or 1, num_heads or 1, ...] of a mask to the leading axes of scores."""
        batch = self.shape.batch if x.shape[0] != 1 else (1,) * len(self.shape.batch)
        return x.reshape((*batch, *x.shape[1:]) if self.has_heads else x.shape[2:])

    def of_query_heads(self, of_kv_heads: Array) -> Array:
        """Repeat rows of key/value heads [..., kv_heads, n, dim] for each query head that reads them."""
        if not self.has_heads or of_kv_heads.shape[-3] == self.shape.num_heads:
            return of_kv_heads
        return self.xp.repeat(of_kv_heads, self.shape.num_heads // max(of_kv_heads.shape[-3], 1), axis=-3)

    @cached_property
    def diagonal(self) -> Diagonal:
        """The blocks that the diagonal crosses."""
        return Diagonal.of(self.xp, (self.shape.seqlen_q, self.shape.seqlen_kv), self.block, self.offset)

    def eligible(self) -> Array | None:
        """Return a bool array that is True for blocks with an allowed element; None if all blocks have one.

        The array broadcasts against [*heads, rows, columns].
        """
        xp = self.xp
        if not self.has_own_mask:
            return self.diagonal.is_met if self.is_causal else None
        index = BlockIndex.from_mask(self.mask, block=self.block, **self.shape._asdict())
        return self.leading(xp.asarray(index.states() != 0))

    def stairs(self, step_q: int, step_kv: int, needed_keys: int = 1) -> Mask | None:
        """Return the causal mask between groups of `step_q` queries and `step_kv` keys; None if not causal.

        A group of queries attends a group of keys if its last query attends the first `needed_keys` of the group.
        """
        return Stairs(step_q, step_kv, step_q + self.offset - needed_keys) if self.is_causal else None

    def rule(self, budget: Budget, forced: Forced) -> ChoiceRule:
        """Return the rule that decides which blocks of a row to keep; it applies to any scores and any mask."""
        return ChoiceRule(
            lengths=(self.shape.seqlen_q, self.shape.seqlen_kv), block=self.block, offset=self.offset,
            is_causal=self.is_causal and not self.has_own_mask, count=max(budget.top_k or 0, budget.min_blocks),
            mass=float(budget.part or 0), threshold=budget.threshold,
            num_sinks=forced.sink, num_local=forced.local, has_diagonal=bool(forced.diagonal),
            most=budget.max_blocks or 0,
        )  # fmt: skip

    def chosen(
        self,
        scores: Array,
        shares: Array | None,
        budget: Budget,
        forced: Forced,
        extra: Array | None = None,
        allowed: Array | None = None,
    ) -> Array:
        """Choose blocks by a budget; return a bool array with the shape of the scores.

        If `shares` is None, all blocks have equal weight. `extra` are additional forced blocks. `allowed` are the
        blocks that may be kept, if these are fewer than the masks allow. On a device, a kernel makes the choice.
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
        """Return the blocks that must be kept if they are eligible, bool [rows, columns]."""
        return self.diagonal.forced(forced)

    def index(self, blocks: Array) -> BlockIndex:
        """Return the index of blocks, bool [*heads, rows, columns], restricted to the elements that the masks allow."""
        if self.xp.__name__ == "cupy":
            return index_of(blocks, self.mask, self.shape, self.block)
        pattern = BlockPattern(blocks, self.block)
        whole = pattern if self.mask == Band() else pattern & self.mask
        return BlockIndex.from_mask(whole, block=self.block, **self.shape._asdict())


def block_sums(x: Array, side: int) -> Array:
    """Sum blocks of `side` rows, [..., num_blocks, dim], in the accumulator's dtype; count booleans."""
    num_blocks, dtype = -(-x.shape[-2] // side), None if x.dtype == bool else accumulator_dtype(x.dtype)
    blocks = padded(x, num_blocks * side).reshape(*x.shape[:-2], num_blocks, side, x.shape[-1])
    return blocks.sum(axis=-2, dtype=dtype)


def block_means(x: Array, side: int) -> Array:
    """Compute the means of blocks of `side` rows, [..., num_blocks, dim], in the accumulator's dtype."""
    xp, length, sums = namespace(x), x.shape[-2], block_sums(x, side)
    if length % side == 0:
        return sums / side
    counts = xp.minimum(length - xp.arange(0, sums.shape[-2] * side, side), side).astype(sums.dtype)
    return sums / counts[:, None]


def padded(x: Array, length: int) -> Array:
    """Pad rows with zeros to a length; return the same array if it has that length."""
    if x.shape[-2] == length:
        return x
    longer = namespace(x).zeros((*x.shape[:-2], length, x.shape[-1]), dtype=x.dtype)
    longer[..., : x.shape[-2], :] = x
    return longer


def of_strides(x: Array, stride: int, *, turned: bool) -> Array:
    """Join each run of `stride` rows of x to one row: [..., n, d] becomes [..., n / stride, stride d].

    If `turned`, the rows of a run are joined in reverse order, so that the product of a reversed row of q and a row of
    k is the sum of the scores on an antidiagonal.
    """
    groups = x.reshape(*x.shape[:-2], x.shape[-2] // stride, stride, x.shape[-1])
    groups = groups[..., ::-1, :] if turned else groups
    return groups.reshape(*groups.shape[:-2], stride * x.shape[-1])
