"""The specification of a kernel: everything that its machine code depends on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..arrays import accumulator_dtype
from ..scores.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """Everything that changes a kernel's machine code, and nothing else.

    >>> import numpy as np
    >>> KernelSpec(
    ...     family="simt", entry="forward", dtype=np.dtype(np.float32),
    ...     head_dim=64, value_dim=64, block_q=64, block_kv=64,
    ... ).name
    'simt_forward'

    Attributes
    ----------
    family, entry : str
        kernels_cu/<family>/<entry>.cu, which defines the kernel <family>_<entry>.
    dtype : numpy.dtype
        Of q, k and v.
    head_dim, value_dim : int
        What the kernel is compiled for: the problem's own, rounded up.
    block_q, block_kv : int
        Queries and keys of a tile.
    num_warps : int
        Of a thread block.
    min_blocks : int
        Thread blocks that a multiprocessor holds at least: what the compiler shares the registers among.
    is_listed : bool
        The kernel walks a list of blocks.
    is_ordered : bool
        Without a list too, tiles are taken in an order that the work has.
    cuts_sequences : bool
        Ordered tiles of long packed sequences start and end with them.
    num_stages : int
        Tiles that are copied ahead and at hand.
    dq_atomic_width : 0, 1 or 4
        Sums of dQ that one instruction adds to; 0 where dQ has a kernel of its own.
    fuses_dq_epilogue : bool
        Blocks that add to dQ may finish it: of some batch entries and heads, or, where they count arrivals, all of it.
    counts_dq_arrivals : bool
        Without a list too, blocks count the tiles of keys that have come to a tile of queries: the first stores its
        part of dQ, and with `fuses_dq_epilogue` the last finishes it.
    adds_dq_in_order : bool
        Tiles of keys add to dQ in their order, so that it repeats bit for bit; the count is of those that are done.
    is_split : bool
        Blocks share a tile's keys, and leave their parts to be merged.
    pack_gqa : bool
        A tile holds the queries of all heads that share a key/value head.
    mma_rows : 0, 8 or 16
        Rows of the tensor cores' instruction that makes the products; 0 where multiply-adds make them.
    has_watchdog : bool
        Waiting for long at a barrier in shared memory ends the kernel with an error, where it would hang.
    precision : "ieee", "tf32" or "tf32x3"
        Of the products.
    has_sink : bool
        The kernel takes a sink of each head, which its softmax counts, or whose gradient it makes.
    has_dropout : bool
        The kernel drops weights.
    reads_dropout_seed : bool
        It reads the seed that they depend on from an array.
    is_paged : bool
        Keys and values lie in the pages of a cache.
    part_keys : int
        Keys of a part that starts at a multiple of them; 0 where parts follow from the length of their sequence.
    is_quantized : bool
        q, k and v are numbers of e4m3 with scales, and dtype is o's.
    splits_head_dim : bool
        Rows of q and k are longer than head_dim, and come in chunks of it.
    score : Program, optional
        The score function, derived for kernels that make gradients.
    score_wrt : tuple of str
        Captured arrays whose gradients are arguments of the kernel.
    score_sums : tuple of str
        The kinds of their sums, as `planning.captured_sums` names them; empty if numbers are added to the gradients.
    score_is_staged : bool
        Producers put a step's elements of the array that `planning.staged_array` names into shared memory.
    score_is_stored : bool
        The kernel stores the gradient of that array, or its part of it, which no other thread block adds to.
    score_bins : int
        Elements of a table's row whose gradient has bins of each thread in shared memory, or 0.
    score_takes_products : bool
        The kernel gives the score function q . k without the softmax scale (`scores.products`).
    """

    family: str
    entry: str
    dtype: np.dtype[Any]
    head_dim: int
    value_dim: int
    block_q: int
    block_kv: int
    num_warps: int = 4
    min_blocks: int = 2
    is_listed: bool = False
    is_ordered: bool = False
    cuts_sequences: bool = False
    num_stages: int = 1
    dq_atomic_width: int = 0
    fuses_dq_epilogue: bool = False
    counts_dq_arrivals: bool = False
    adds_dq_in_order: bool = False
    is_split: bool = False
    pack_gqa: bool = False
    mma_rows: int = 0
    has_watchdog: bool = False
    precision: str = "ieee"
    has_sink: bool = False
    has_dropout: bool = False
    reads_dropout_seed: bool = False
    is_paged: bool = False
    part_keys: int = 0
    is_quantized: bool = False
    splits_head_dim: bool = False
    score: Program | None = None
    score_wrt: tuple[str, ...] = ()
    score_sums: tuple[str, ...] = ()
    score_is_staged: bool = False
    score_is_stored: bool = False
    score_bins: int = 0
    score_takes_products: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}_{self.entry}"

    @property
    def accumulator(self) -> np.dtype[Any]:
        """The dtype of sums: float64 for float64, else float32."""
        return accumulator_dtype(self.dtype)

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    def __str__(self) -> str:
        listed = [field.name for field in fields(self)[2:] if not field.name.startswith("score")]
        of_score = [] if self.score is None else [f"score {len(self.score.instructions)} operations"]
        return " ".join([self.name, *(f"{name} {getattr(self, name)}" for name in listed), *of_score])
