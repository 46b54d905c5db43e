"""Shared memory of the sm90 family's kernels, and the boxes in which TMA fills it."""

from __future__ import annotations

from ..score_bins import WARP_LANES
from ..spec import KernelSpec

ROWS = 64  # queries that a warpgroup multiplies at a time
NO_PRODUCTS = ("backward_statistics", "convert_dq")  # entries of kernels that copy no tiles and multiply nothing
_NUM_TILE_INFOS = 4  # tiles in flight
# Sizes of messages and barriers, in bytes.
_SLOT, _BARRIER, _TILE_INFO, _GROUP_RANGE, _MESSAGE, _FLAGS, _OTHER = 16, 8, 140, 12, 20, 4, 8
_ARRAY_ALIGNMENT = 1024  # of a staged array's slots, whose rows are permuted by bits of their addresses
_KEPT_STAGES = 2  # steps that dropout's bits are drawn ahead
_COORDS = 12  # more bytes of a tile's message if dO is loaded too
_ARRAY_COORDS = 16  # more bytes of a tile's message if an array is staged
_QUERY_PARTS = 24  # more bytes of a range of queries if backward tiles end with their sequences
_BACKWARD_MESSAGE, _BACKWARD_WORK, _BACKWARD_OTHER = 88, 104, 48
_MAX_SHARED_BYTES, _STORAGE_BYTES = 227 << 10, 5 << 10  # as in sm90/q_tiles.cuh
_MASS_MESSAGE, _MASS_TILE = 24, 56  # as in sm90/block_mass.cu, the tile without its queries


def shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of a block: its tile, the rings of what it steps over, messages and barriers."""
    both, stages = spec.head_dim + spec.value_dim, spec.num_stages
    if spec.entry in NO_PRODUCTS:
        return 0
    if spec.entry == "block_mass":
        rows = stages * spec.block_kv + (stages if spec.splits_head_dim else 1) * spec.block_q
        storage = stages * (_SLOT + _MASS_MESSAGE) + _BARRIER + 4 * spec.block_q + _MASS_TILE
        return spec.dtype.itemsize * rows * spec.head_dim + storage + -storage % 8
    if spec.entry in ("backward", "backward_wide"):
        scores = spec.block_q * spec.block_kv
        elements = spec.block_kv * both + stages * spec.block_q * spec.head_dim
        if spec.entry == "backward_wide":
            elements += 3 * scores
        elif spec.dq_atomic_width:
            elements += scores + 2 * spec.block_q * spec.head_dim
        do_elements = spec.block_q * spec.value_dim
        fits = spec.dtype.itemsize * (elements + stages * do_elements) + _STORAGE_BYTES <= _MAX_SHARED_BYTES
        do_stages = stages if spec.entry == "backward" or fits else 1
        queries = 4 * (spec.block_q // 16 + query_stats_words(spec) + spec.block_q * -(-spec.block_kv // 32))
        work = _BACKWARD_WORK + _ARRAY_COORDS * spec.score_is_staged
        storage = stages * (queries + _BACKWARD_MESSAGE + _BARRIER) + (stages + 1) * work + _BACKWARD_OTHER
        storage += _QUERY_PARTS * spec.cuts_sequences
        storage += _SLOT * (2 + stages + do_stages)
        storage += -storage % 16
        bins = 4 * WARP_LANES * spec.score_bins * (spec.num_warps - 4)
        storage += _staged_bytes(spec, storage) + bins
        return spec.dtype.itemsize * (elements + do_stages * do_elements) + storage
    loads_do = spec.entry == "backward_rows"
    is_small = spec.is_listed and spec.block_q == ROWS
    is_narrow = max(spec.head_dim, spec.value_dim) <= 128
    q_stages = 2 if is_narrow and not is_small and not loads_do and not spec.score_is_staged else 1
    query_dims = spec.head_dim + spec.value_dim * loads_do
    elements = q_stages * spec.block_q * query_dims + stages * spec.block_kv * both
    storage = storage_bytes(spec, q_stages, loads_do)
    return spec.dtype.itemsize * elements + storage + _staged_bytes(spec, storage, _SLOT * (spec.block_q // ROWS))


def _staged_bytes(spec: KernelSpec, storage: int, slot: int = 0) -> int:
    """Shared memory of a staged array and its slots, for all stages: StagedArray of sm90/staged_array.cuh."""
    slots = spec.num_stages * (2 * spec.block_q * spec.block_kv + slot)
    return (slots + -storage % _ARRAY_ALIGNMENT) * spec.score_is_staged


def storage_bytes(spec: KernelSpec, q_stages: int, loads_do: bool = False) -> int:
    """Shared memory of messages and barriers in kernels that walk the keys of a tile of queries."""
    groups, stages = spec.block_q // ROWS, spec.num_stages
    tile_info = _TILE_INFO + _GROUP_RANGE * groups + _COORDS * loads_do
    storage = _SLOT * (q_stages + 2 * stages) + _NUM_TILE_INFOS * (_SLOT + -(-tile_info // 16) * 16)
    if spec.entry == "forward" and spec.num_warps == 4 * (2 + groups):  # a warpgroup that draws
        words = spec.block_q * 2 * -(-spec.block_kv // 64)
        storage += _KEPT_STAGES * (_SLOT + 4 * words)
    storage += (_MESSAGE + _FLAGS * groups) * stages + _OTHER
    return storage + -storage % 16


def query_stats_words(spec: KernelSpec) -> int:
    """Words of the statistics of a tile of queries: QueryStats of sm90/query_stats.cuh."""
    words = 2 * spec.block_q + spec.block_q // 16 + 3
    return words + -words % 4


def boxes(spec: KernelSpec) -> dict[str, tuple[int, int]]:
    """Rows and columns of the boxes in which TMA copies operands: one panel each, WgmmaTile of tile/wgmma_tile.cuh.

    Kernels that multiply nothing have none.
    """
    if spec.entry in NO_PRODUCTS:
        return {}
    head_panel, value_panel = (64 if dim % 64 == 0 else 32 for dim in (spec.head_dim, spec.value_dim))
    found = {"q": (spec.block_q, head_panel), "k": (spec.block_kv, head_panel), "v": (spec.block_kv, value_panel)}
    if spec.entry == "block_mass":
        return {name: found[name] for name in "qk"}
    if spec.entry == "forward":
        return found | {"o": (ROWS // 4, value_panel)}  # the rows of a warp
    if spec.entry == "backward_wide" and spec.head_dim % 128:  # half of the columns are whole panels
        found["k"] = (spec.block_kv, 32)
    return found | {"do": (spec.block_q, value_panel)}
