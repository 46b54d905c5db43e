"""Plans of the decode kernel, in which a few new tokens attend to a KV cache: its tile, parts and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from .device import DeviceSpec
from .families.family import FORWARD_INPUTS
from .families.sm80 import DECODING, DECODING_E4M3
from .families.sm80_storage import MOST_PARTS
from .launches import MATRICES, POINTER, Feature, Launch, Pass, Value, Workspace, structure
from .problem import Problem
from .routing import FAMILIES
from .score_launches import with_score_argument
from .sinks import sink_forward
from .spec import KernelSpec

TABLES = ("table", "lengths", "counts", "num_faults")  # arrays of a cache in addition to its pages
CACHE_PAGES = structure(
    (MATRICES, "k", "v"),
    (POINTER, *TABLES),
    (np.int32, "batch", "num_pages", "max_pages", "page_size", "capacity", "num_kv_heads", "head_dim", "value_dim"),
)
OF_CACHE = {f"cache.{name}": name for name in ("k", "v", *TABLES)}  # names of a nested CACHE_PAGES
SCALE_NAMES = ("k_scale", "v_scale")
CACHE_SCALES = structure((MATRICES, *SCALE_NAMES))  # scales of FP8 pages
DECODE = structure(
    (MATRICES, "q", "o", "lse"),
    (CACHE_PAGES, "cache"),
    (POINTER, "o_parts", "stats_parts", "arrivals"),
    (np.int32, "group_size", "num_queries", "max_parts", "left", "right"),
    (np.float64, "softmax_scale"),
)
MOST_ROWS = 64  # maximum rows of a tile: query heads per key/value head times new tokens
PART_STEP = 64  # parts of fixed size start at multiples of this number of keys, a multiple of every tile's block_kv
_DIMS = (64, 128, 256)
_CHUNK = 16  # bytes per copy instruction


class CacheLayout(NamedTuple):
    """The number and sizes of a cache's pages.

    Attributes
    ----------
    capacity : int
        Maximum number of positions per sequence.
    page_size, num_pages : int
        Positions per page, and pages of all sequences. A contiguous cache has one page per sequence.
    max_pages : int
        Maximum number of pages per sequence: the columns of the page table.
    """

    capacity: int
    page_size: int
    num_pages: int
    max_pages: int

    def numbers(self, batch: int, num_kv_heads: int, dims: tuple[int, int]) -> dict[str, int]:
        """Return the numbers of the record CACHE_PAGES; `dims` are the head_dim and value_dim of the cache."""
        head_dim, value_dim = dims
        return self._asdict() | {
            "batch": batch, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim
        }  # fmt: skip


class _Tile(NamedTuple):
    block_kv: int
    key_groups: int  # groups of warps that split the keys of a step
    num_stages: int


# Tiles by the larger of head_dim and value_dim, and by the minimum number of rows. The first tile that fits in shared
# memory is used. The number of stages may depend on the batch because it does not change the bits of results.
_TILES: dict[int, dict[int, tuple[_Tile, ...]]] = {
    128: {0: (_Tile(64, 4, 4), _Tile(64, 4, 3), _Tile(64, 4, 2))},
    256: {0: (_Tile(64, 4, 3), _Tile(64, 4, 2), _Tile(32, 2, 2)), 64: (_Tile(64, 2, 2), _Tile(32, 2, 2))},
}
_STAGES_OF_MANY_BLOCKS = 2  # maximum stages for which more than two blocks fit on a multiprocessor
_STAGES_OF_TWO_BLOCKS = 3  # maximum stages for which two blocks fit on a multiprocessor
_E4M3_STAGES = 2  # number of FP8 stages that take the memory of one 16-bit stage


def decode_reasons(problem: Problem, device: DeviceSpec, *, is_quantized: bool = False) -> list[str]:
    """Return why the decode kernel does not serve a problem on a device, for a cache of q's dtype or of FP8."""
    reasons = FAMILIES[DECODING.family].reasons(problem, device)
    rows = problem.group_size * problem.seqlen_q
    if not 1 <= rows <= MOST_ROWS:
        reasons.append(f"q must have 1 to {MOST_ROWS} rows per key/value head; got {rows}")
    return reasons + chunked_dim_reasons(problem, is_quantized=is_quantized) + scale_reasons(problem)


def chunked_dim_reasons(problem: Problem, *, is_quantized: bool = False) -> list[str]:
    """Return why kernels that copy rows of keys and values in chunks do not serve a problem's dtype or dimensions."""
    reasons = []
    if problem.precision != "ieee" or problem.dtype.itemsize != 2:
        reasons.append(f"q must be float16 or bfloat16; got {problem.dtype} at precision {problem.precision!r}")
    itemsize = 1 if is_quantized else problem.dtype.itemsize
    for name, dim in (("head_dim", problem.head_dim), ("value_dim", problem.value_dim)):
        if dim * itemsize % _CHUNK:
            reasons.append(f"{name} must be a multiple of {_CHUNK // itemsize}; got {dim}")
    return reasons


def scale_reasons(problem: Problem) -> list[str]:
    """Return why kernels that read a cache in place do not serve a problem's scale: keys would have to be scaled."""
    scaling = problem.scaling
    if (scaling.q_exponent, scaling.k_exponent) == (0, 0):
        return []
    return [f"scale must be 0, or from 2**-64 to 2**64 in magnitude; got {problem.softmax_scale}"]


def chunk_reasons(name: str, strides: tuple[int, ...], itemsize: int, address: int) -> list[str]:
    """Return why the rows of a cache's array cannot be copied in aligned chunks of 16 bytes.

    >>> chunk_reasons("k", (4096, 2048, 128, 2), 2, 32)
    []
    """
    if strides[-1] == itemsize and all(step % _CHUNK == 0 for step in (*strides[:-1], address)):
        return []
    return [f"{name} must have contiguous rows that start at multiples of {_CHUNK} bytes; got strides {strides}"]


def decode_pass(
    problem: Problem,
    device: DeviceSpec,
    layout: CacheLayout,
    *,
    left: int | None,
    right: int | None,
    part_keys: int | None = None,
    is_quantized: bool = False,
) -> Pass:
    """Return the launch of the decode kernel for a problem without `decode_reasons`.

    How a sequence is split into parts depends on its own length, but not on the batch. Its results therefore do not
    depend on the batch either.

    Parameters
    ----------
    problem : Problem
        The problem of q [batch, num_heads, new tokens, head_dim] and of keys and values
        [batch, num_kv_heads, capacity, ...].
    left, right : int, optional
        Keys before and after a query's own position that it attends to; None is unlimited.
    part_keys : int, optional
        Keys per part; parts then start at multiples of this number. By default, the size of parts depends on the
        sequence's length.
    is_quantized : bool
        The cache holds FP8 numbers and scales instead of keys and values of q's dtype.
    """
    spec = decode_spec(problem, device, part_keys, is_quantized=is_quantized)
    max_parts = parts_of(problem, device, -(-layout.capacity // spec.block_kv))
    if part_keys is not None:
        max_parts = -(-layout.capacity // part_keys)
    pairs = problem.mask_shape.num_batch, problem.num_kv_heads
    workspaces = part_workspaces(pairs, problem.group_size * problem.seqlen_q, spec, max_parts)
    return pass_of_parts(problem, layout, spec, workspaces, window_numbers(layout, left, right))


def pass_of_parts(
    problem: Problem, layout: CacheLayout, spec: KernelSpec, workspaces: Mapping[str, Workspace],
    window: Mapping[str, int], lists: Feature | None = None,
) -> Pass:  # fmt: skip
    """Return the launch of a decode kernel.

    Parameters
    ----------
    workspaces : dict of Workspace by name
        The result of `part_workspaces`.
    window : dict of int
        The result of `window_numbers`.
    lists : Feature, optional
        The record of the block lists, for kernels in which queries attend to chosen blocks.
    """
    is_quantized, max_parts = spec.entry is DECODING_E4M3, workspaces["o_parts"].shape[-3]
    others = (*scale_features(is_quantized), *(() if lists is None else (lists,)))
    launch = Launch(
        spec=spec, tiles=prod(workspaces["o_parts"].shape[:-2]),
        reads=(*FORWARD_INPUTS, *SCALE_NAMES * is_quantized, "table", "lengths", "counts"),
        writes=("o", "lse", "num_faults", *workspaces), features=("decode", *(each.name for each in others)),
    )  # fmt: skip
    cache = layout.numbers(
        problem.mask_shape.num_batch, problem.num_kv_heads, (problem.head_dim, problem.value_dim)
    )  # fmt: skip
    numbers: dict[str, Value] = {
        "cache": cache, "group_size": problem.group_size, "num_queries": problem.seqlen_q, "max_parts": max_parts,
        "softmax_scale": problem.kernel_scale, **window,
    }  # fmt: skip
    decode = Feature("decode", DECODE, numbers, (*TABLES, *workspaces), names=OF_CACHE)
    kernels = Pass({"decode": launch}, dict(workspaces), (decode, *others))
    return with_score_argument(sink_forward(kernels, problem, "decode"), problem)


def scale_features(is_quantized: bool) -> tuple[Feature, ...]:
    """Return the feature that passes the scales of an FP8 cache; empty for other caches."""
    return (Feature("scales", CACHE_SCALES),) * is_quantized


def window_numbers(layout: CacheLayout, left: int | None, right: int | None) -> dict[str, int]:
    """Return how many keys before and after its own position a query attends to; None is unlimited."""
    return {
        "left": layout.capacity if left is None else min(left, layout.capacity),
        "right": layout.capacity - 1 if right is None else min(right, layout.capacity - 1),
    }


def parts_of(problem: Problem, device: DeviceSpec, num_steps: int) -> int:
    """Return the maximum number of parts of a sequence that takes at most this many steps."""
    most = max(1, min(MOST_PARTS, num_steps))
    return min(num_parts(problem, device), 1 << (most - 1).bit_length())


def part_workspaces(pairs: tuple[int, ...], rows: int, spec: KernelSpec, max_parts: int) -> dict[str, Workspace]:
    """Return the workspaces for parts of `rows` rows: o, the maximum and sum of each row, and counts of finished parts.

    `pairs` are the extents of the axes whose elements have their own parts, such as sequences and key/value heads.
    """
    single = np.dtype(np.float32)
    return {
        "o_parts": Workspace((*pairs, max_parts, rows, spec.value_dim), single),
        "stats_parts": Workspace((*pairs, max_parts, rows, 2), single),
        "arrivals": Workspace(pairs, np.dtype(np.int32), is_zeroed=True),
    }


def num_parts(problem: Problem, device: DeviceSpec) -> int:
    """Return the maximum parts of a sequence: the power of two nearest to the multiprocessors per key/value head."""
    ratio = device.num_processors / problem.num_kv_heads
    return int(min(MOST_PARTS, max(1, 2 ** round(float(np.log2(ratio))))))


def decode_spec(
    problem: Problem, device: DeviceSpec, part_keys: int | None = None, *, is_quantized: bool = False
) -> KernelSpec:
    """Return the kernel for a problem, with the first tile that fits in the device's shared memory.

    With `part_keys`, warps split the keys of a step in the same way for any number of rows.
    """
    head_dim, value_dim = (next(each for each in _DIMS if each >= dim) for dim in (problem.head_dim, problem.value_dim))
    rows = problem.group_size * problem.seqlen_q
    block_q = next(each for each in (16, 32, MOST_ROWS) if each >= rows)
    widest = max(head_dim, value_dim)
    tables = next(tables for width, tables in _TILES.items() if width >= widest)
    tiles = tables[max(least for least in tables if block_q >= least or part_keys is not None)]
    blocks = problem.mask_shape.num_batch * problem.num_kv_heads * num_parts(problem, device)
    if widest <= 128 and (blocks > device.num_processors or block_q > 16):
        many = block_q == 16 and blocks > 2 * device.num_processors
        most = _STAGES_OF_MANY_BLOCKS if many else _STAGES_OF_TWO_BLOCKS
        tiles = tuple(tile for tile in tiles if tile.num_stages <= most)
    for tile in tiles:
        num_warps = tile.key_groups * block_q // 16
        spec = KernelSpec(
            entry=DECODING_E4M3 if is_quantized else DECODING, dtype=problem.dtype, head_dim=head_dim,
            value_dim=value_dim, block_q=block_q, block_kv=tile.block_kv, num_warps=num_warps,
            min_blocks=_min_blocks(widest, num_warps, tile.num_stages),
            num_stages=tile.num_stages * (_E4M3_STAGES if is_quantized else 1), pack_gqa=True,
            has_sink=problem.operand("sink") is not None, part_keys=part_keys or 0,
        )  # fmt: skip
        largest = spec if part_keys is None else replace(spec, block_q=MOST_ROWS)
        if largest.shared_bytes <= device.tile_memory_bytes:
            break
    return spec


def _min_blocks(widest: int, num_warps: int, num_stages: int) -> int:
    """Return how many thread blocks per multiprocessor the compiler must leave enough registers for."""
    if widest > 128 or num_warps > 8 or num_stages > _STAGES_OF_TWO_BLOCKS:
        return 1
    return 3 if num_warps == 4 and num_stages == _STAGES_OF_MANY_BLOCKS else 2
