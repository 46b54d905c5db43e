"""The specification of a kernel: everything that its machine code depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np

from ..arrays import accumulator_dtype
from ..scores.program import Program

SIMT, SM80, SM90, FA1, NAIVE = "simt", "sm80", "sm90", "fa1", "naive"  # folders of kernels_cu, names of kernel=
Boxes: TypeAlias = Mapping[str, tuple[int, int]]  # rows and columns of a box, by array


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A kernel, and the facts about it that the host needs; each stands next to the code that launches the kernel.

    >>> entry = Entry(family="simt", name="forward", applies_score=True)
    >>> entry.applies_score, entry.draws_dropout
    (True, False)

    Attributes
    ----------
    family, name : str
        kernels_cu/<family>/<name>.cu, which defines the kernel <family>_<name>.
    shared_bytes : callable, optional
        Counts the bytes of dynamic shared memory of a thread block from the specification, if it has any.
    boxes : callable, optional
        Returns the boxes that the kernel copies by tensor maps, if it takes any.
    runs_as : str
        The family on whose chips the kernel runs, if it is not that of the folder.
    loads_do : bool
        The kernel loads dO, with queries if it walks keys: headers that both passes share ask for `kIsBackward`.
    is_persistent : bool
        Thread blocks take further tiles as they finish one; otherwise each has one tile.
    takes_order : bool
        Thread blocks can take tiles in an order that the work has (`is_ordered`).
    holds_keys : bool
        A tile is a block of keys, for which the kernel steps over queries; otherwise the reverse.
    applies_score : bool
        The kernel computes scores or their gradients, by the score function if a call has one.
    adds_gradients : bool
        Of the kernels of the backward pass with a score function, this one adds up the gradients of captured arrays.
    draws_dropout : bool
        The kernel makes weights, or gradients of scores from them, and drops weights under dropout.
    can_finish_dq : bool
        Thread blocks that add to dQ can count what has arrived at a tile of queries, and write its dQ.
    query_record_words : callable, optional
        Counts the words of the statistics that the kernel writes for a tile of queries; other kernels write delta.
    has_exponentials : bool
        The kernel computes a power of two for each score.
    products : (int, int)
        Products over the scores of a tile: how many have head_dim as a side, and how many value_dim.
    """

    family: str
    name: str
    shared_bytes: Callable[[KernelSpec], int] | None = None
    boxes: Callable[[KernelSpec], Boxes] | None = None
    runs_as: str = ""
    loads_do: bool = False
    is_persistent: bool = False
    takes_order: bool = False
    holds_keys: bool = False
    applies_score: bool = False
    adds_gradients: bool = False
    draws_dropout: bool = False
    can_finish_dq: bool = False
    query_record_words: Callable[[KernelSpec], int] | None = None
    has_exponentials: bool = False
    products: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """Everything that changes a kernel's machine code, and nothing else.

    >>> import numpy as np
    >>> KernelSpec(
    ...     entry=Entry(family="simt", name="forward"), dtype=np.dtype(np.float32),
    ...     head_dim=64, value_dim=64, block_q=64, block_kv=64,
    ... ).name
    'simt_forward'

    Attributes
    ----------
    entry : Entry
        The kernel.
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
    finishes_dq_in_order : bool
        Tiles of keys share dQ of some batch entries and heads in an order: the last one stores its part, and the first
        one finishes dQ.
    last_finishes_dq : bool
        Tiles of keys count their arrivals at a tile of queries: the first to arrive stores its part of dQ, and the last
        finishes dQ.
    adds_dq_in_order : bool
        Tiles of keys add to dQ in their order, so that it repeats bit for bit.
    is_split : bool
        Blocks share a tile's keys, and leave their parts to be merged by another kernel.
    pack_gqa : bool
        A tile holds the queries of all heads that share a key/value head.
    packs_queries : bool
        A tile holds neighbouring queries with all heads that share their lists of blocks, and walks the union of these.
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

    entry: Entry
    dtype: np.dtype[np.generic]
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
    finishes_dq_in_order: bool = False
    last_finishes_dq: bool = False
    adds_dq_in_order: bool = False
    is_split: bool = False
    pack_gqa: bool = False
    packs_queries: bool = False
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
    def family(self) -> str:
        """The folder of the kernel's file: a family of attention, or "cache", "fp8" or "lists"."""
        return self.entry.family

    @property
    def name(self) -> str:
        return f"{self.entry.family}_{self.entry.name}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a thread block."""
        return 0 if self.entry.shared_bytes is None else self.entry.shared_bytes(self)

    @property
    def boxes(self) -> Boxes:
        """Boxes that the kernel copies by tensor maps, by array; empty if it takes no maps."""
        return {} if self.entry.boxes is None else self.entry.boxes(self)

    @property
    def finishes_dq(self) -> bool:
        """True if thread blocks that add to dQ also scale and round it."""
        return self.finishes_dq_in_order or self.last_finishes_dq

    @property
    def accumulator(self) -> np.dtype[np.generic]:
        """The dtype of sums: float64 for float64, else float32."""
        return accumulator_dtype(self.dtype)

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    def __str__(self) -> str:
        listed = [field.name for field in fields(self)[1:] if not field.name.startswith("score")]
        of_score = [] if self.score is None else [f"score {len(self.score.instructions)} operations"]
        return " ".join([self.name, *(f"{name} {getattr(self, name)}" for name in listed), *of_score])
