"""The specification of a kernel: everything that its machine code depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np

from ..arrays import accumulator_dtype
from ..scores.program import Program

SIMT, SM80, SM90, FA1, NAIVE = "simt", "sm80", "sm90", "fa1", "naive"  # folders of kernels_cu, and values of kernel=
Boxes: TypeAlias = Mapping[str, tuple[int, int]]  # rows and columns of a box, by array


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A kernel's file, and the facts about it that planning needs.

    Each entry is defined next to the code that launches the kernel.

    >>> entry = Entry(family="simt", name="forward", applies_score=True)
    >>> entry.applies_score, entry.draws_dropout
    (True, False)

    Attributes
    ----------
    family, name : str
        kernels_cu/<family>/<name>.cu, which defines the kernel <family>_<name>.
    shared_bytes : callable, optional
        Returns the bytes of dynamic shared memory per thread block for a specification; None if there is none.
    boxes : callable, optional
        Returns the boxes that the kernel copies by tensor maps; None if it takes no tensor maps.
    runs_as : str
        The attention family that supports the same chips, if the kernel's folder is not an attention family.
    loads_do : bool
        The kernel loads dO, next to Q if it holds keys. Headers that both passes share test it as `kIsBackward`.
    is_persistent : bool
        Each thread block processes several tiles in turn; otherwise, it processes one tile.
    takes_order : bool
        Thread blocks can take tiles in an order that the work list specifies (`is_ordered`).
    holds_keys : bool
        A work tile is a block of keys, and the kernel loops over queries; otherwise the reverse.
    applies_score : bool
        The kernel computes scores or their gradients, and applies the call's score function if there is one.
    adds_gradients : bool
        This kernel of the backward pass accumulates the gradients of the arrays that a score function captures.
    draws_dropout : bool
        The kernel computes weights, or gradients of scores from them, and applies dropout.
    can_finish_dq : bool
        Thread blocks that add to dQ of a query tile can count each other, so that the last one writes dQ of the tile.
    query_record_words : callable, optional
        Returns the number of 4-byte words of statistics that the kernel writes per query tile; None if it writes delta.
    has_exponentials : bool
        The kernel computes one exp2 per score.
    products : (int, int)
        Matrix products per tile of scores: how many have a side of head_dim, and how many of value_dim.
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
        The kernel's file.
    dtype : numpy.dtype
        Dtype of q, k and v.
    head_dim, value_dim : int
        Dimensions that the kernel is compiled for: those of the problem, rounded up.
    block_q, block_kv : int
        Queries and keys of a tile.
    num_warps : int
        Warps of a thread block.
    min_blocks : int
        Thread blocks that must fit on a multiprocessor at once: the second argument of `__launch_bounds__`.
    is_listed : bool
        The kernel walks a block list.
    is_ordered : bool
        Without a block list, tiles are taken in an order that the work list specifies.
    cuts_sequences : bool
        Tiles are aligned to the starts of packed sequences instead of multiples of the tile size.
    num_stages : int
        Slots of the shared memory ring: tiles that are in use or being prefetched.
    dq_atomic_width : 0, 1 or 4
        Number of sums of dQ to which one atomic instruction adds; 0 if a separate kernel computes dQ.
    finishes_dq_in_order : bool
        Key tiles of some heads add to dQ in a fixed order: the last tile of keys stores its part first, and the first
        tile of keys adds its part last and finishes dQ.
    last_finishes_dq : bool
        Key tiles that add to dQ of a query tile count each other: the first stores its part of dQ, and the last
        finishes dQ.
    adds_dq_in_order : bool
        Key tiles add to dQ in a fixed order, which makes it bitwise reproducible.
    is_split : bool
        Split-KV: several thread blocks divide a tile's keys, and another kernel merges their partial results.
    pack_gqa : bool
        A tile holds the queries of all heads that share a key/value head.
    packs_queries : bool
        A tile holds neighboring queries of all heads that share their block lists, and walks the union of these lists.
    mma_rows : 0, 8 or 16
        Rows of the mma instruction that computes the products; 0 if the kernel uses fused multiply-adds.
    has_watchdog : bool
        A kernel that waits too long at a shared memory barrier ends with an error instead of hanging.
    precision : "ieee", "tf32" or "tf32x3"
        Precision of the matrix products.
    has_sink : bool
        The kernel takes one sink logit per head, and adds it to the softmax or computes its gradient.
    has_dropout : bool
        The kernel drops weights.
    reads_dropout_seed : bool
        The kernel reads the seed of dropout from an array.
    dropout_is_placed : bool
        The kernel draws the weights of a call that is a part of a larger one.
    is_paged : bool
        Keys and values are stored in the pages of a cache.
    is_chosen : bool
        Each query attends to chosen blocks of the keys in a cache.
    part_keys : int
        Keys per part if parts start at multiples of this number; 0 if parts depend on the length of their sequence.
    is_quantized : bool
        q, k and v are FP8 (e4m3) with scales, and `dtype` is the dtype of o.
    splits_head_dim : bool
        Rows of q and k are longer than `head_dim`, and are loaded in chunks of `head_dim` elements.
    tangents : tuple of str
        The arrays along whose tangents the kernel differentiates: "q", "k", "v", "sink", and "score" if arrays of the
        score function have tangents.
    score : Program, optional
        The score function; its derivative for kernels that compute gradients.
    score_wrt : tuple of str
        Captured arrays whose gradients are arguments of the kernel.
    score_sums : tuple of str
        The kind of each gradient's sums, a name of `planning.captured_sums`; empty if the kernel adds to the gradients
        directly.
    score_is_staged : bool
        Producer warps copy each step's elements of the array that `planning.staged_array` names to shared memory.
    score_is_stored : bool
        The kernel stores the gradient of that array, or its part of it, because no other thread block adds to it.
    score_bins : int
        Elements of a table's row whose gradient each thread accumulates in bins in shared memory; 0 without bins.
    score_is_placed : bool
        The call is a part of a larger one, and the function's record has its first batch entry, head, query and key.
    score_takes_products : bool
        The kernel passes q . k without the softmax scale to the score function (`scores.products`).
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
    dropout_is_placed: bool = False
    is_paged: bool = False
    is_chosen: bool = False
    part_keys: int = 0
    is_quantized: bool = False
    splits_head_dim: bool = False
    tangents: tuple[str, ...] = ()
    score: Program | None = None
    score_wrt: tuple[str, ...] = ()
    score_sums: tuple[str, ...] = ()
    score_is_staged: bool = False
    score_is_stored: bool = False
    score_bins: int = 0
    score_is_placed: bool = False
    score_takes_products: bool = False

    @property
    def family(self) -> str:
        """The folder of the kernel's file: an attention family, or another folder such as "cache" or "lists"."""
        return self.entry.family

    @property
    def name(self) -> str:
        return f"{self.entry.family}_{self.entry.name}"

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory per thread block."""
        return 0 if self.entry.shared_bytes is None else self.entry.shared_bytes(self)

    @property
    def boxes(self) -> Boxes:
        """Boxes that the kernel copies by tensor maps, by array name; empty if it takes no tensor maps."""
        return {} if self.entry.boxes is None else self.entry.boxes(self)

    @property
    def finishes_dq(self) -> bool:
        """True if thread blocks that add to dQ also scale and round it."""
        return self.finishes_dq_in_order or self.last_finishes_dq

    @property
    def moves_scores(self) -> bool:
        """True if scores, or arrays of the score function, have tangents."""
        return not {"q", "k", "score"}.isdisjoint(self.tangents)

    @property
    def accumulator(self) -> np.dtype[np.generic]:
        """The dtype of accumulators: float64 for float64, else float32."""
        return accumulator_dtype(self.dtype)

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    def __str__(self) -> str:
        listed = [field.name for field in fields(self)[1:] if not field.name.startswith(("score", "tangents"))]
        of_score = [] if self.score is None else [f"score {len(self.score.instructions)} operations"]
        moved = [f"tangents of {', '.join(self.tangents)}"] if self.tangents else []
        return " ".join([self.name, *(f"{name} {getattr(self, name)}" for name in listed), *moved, *of_score])


def untiled(
    entry: Entry, dtype: np.dtype[np.generic] = np.dtype(np.float32), num_warps: int = 4, dim: int = 0, block: int = 0
) -> KernelSpec:
    """Return the specification of a kernel without tiles; the sizes `dim` and `block` are 0 unless headers use them."""
    return KernelSpec(
        entry=entry, dtype=dtype, head_dim=dim, value_dim=dim, block_q=block, block_kv=block, num_warps=num_warps,
        min_blocks=1,
    )  # fmt: skip


def int_per_thread(spec: KernelSpec) -> int:
    """Return the bytes of shared memory for one count or sum of each thread."""
    return 4 * spec.num_threads


def smallest(entry: Entry, dtype: np.dtype[np.generic], num_warps: int = 4) -> KernelSpec:
    """Return the specification of a kernel without tiles, with the smallest sizes for which headers compile."""
    return untiled(entry, dtype, num_warps, dim=32, block=16)
