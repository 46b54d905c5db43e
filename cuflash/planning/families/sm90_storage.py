"""The entries of the sm90 family's kernels: their shared memory, and the boxes that TMA copies to it."""

from __future__ import annotations

from ..options import DOT
from ..score_bins import WARP_LANES
from ..spec import SM90, Boxes, Entry, KernelSpec

ROWS = 64  # queries per wgmma instruction of a warpgroup
_NUM_TILE_INFOS = 4  # number of work tiles in flight
# Sizes of messages and barriers, in bytes.
_SLOT, _BARRIER, _TILE_INFO, _GROUP_RANGE, _MESSAGE, _FLAGS, _OTHER = 16, 8, 140, 12, 20, 4, 8
_ARRAY_ALIGNMENT = 1024  # alignment of a staged array's slots, whose rows are swizzled by bits of their addresses
_KEPT_STAGES = 2  # steps for which dropout's keep bits are drawn ahead
_MEMBERS, _WARPS = 8, 4  # bytes of a step's members, and warps of a tile of neighboring queries; each warp has flags
_COORDS = 12  # additional bytes of a tile's message if dO is loaded too
_ARRAY_COORDS = 16  # additional bytes of a tile's message if an array is staged
_COUNT = 4  # words of a counter of key tiles
_QUERY_PARTS = 24  # additional bytes for the range of queries if backward tiles are aligned to sequences
_GATHERED, _PART, _LAST_PART = 32, 24, 4  # additional bytes if queries are gathered
_BACKWARD_MESSAGE, _BACKWARD_WORK, _BACKWARD_OTHER = 88, 104, 48
_SECOND_STATISTICS, _SECOND_MESSAGE = 4, 24  # numbers of a query, and bytes, in sm90/backward_jvp_columns.cu
_MAX_SHARED_BYTES, _STORAGE_BYTES = 227 << 10, 5 << 10  # equal to those in sm90/q_tiles.cuh
_MASS_MESSAGE, _MASS_TILE = 24, 56  # equal to those in sm90/block_mass.cu; the tile is without its queries


def _mass_bytes(spec: KernelSpec) -> int:
    """Return the bytes of queries, of keys of all stages, and of the queries' lse."""
    stages = spec.num_stages
    rows = stages * spec.block_kv + (stages if spec.splits_head_dim else 1) * spec.block_q
    storage = stages * (_SLOT + _MASS_MESSAGE) + _BARRIER + 4 * spec.block_q + _MASS_TILE
    return spec.dtype.itemsize * rows * spec.head_dim + storage + -storage % 8


def _walk_of_queries_bytes(spec: KernelSpec, more: int, do_stages: int) -> int:
    """Return the bytes of keys and values, of queries and dO of all stages, and of `more` elements."""
    stages = spec.num_stages
    elements = more + spec.block_kv * (spec.head_dim + spec.value_dim)
    elements += spec.block_q * (stages * spec.head_dim + do_stages * spec.value_dim)
    queries = 4 * (spec.block_q // 16 + query_stats_words(spec) + spec.block_q * -(-spec.block_kv // 32))
    work = _BACKWARD_WORK + _ARRAY_COORDS * spec.score_is_staged
    storage = stages * (queries + _BACKWARD_MESSAGE + _BARRIER) + (stages + 1) * work + _BACKWARD_OTHER
    storage += _QUERY_PARTS * spec.cuts_sequences
    gathered = stages * _GATHERED + (stages + 1) * _PART + _LAST_PART
    storage += (gathered + -gathered % 16) * spec.packs_queries
    storage += _SLOT * (2 + stages + do_stages)
    storage += -storage % 16
    bins = 4 * WARP_LANES * spec.score_bins * (spec.num_warps - 4)
    return spec.dtype.itemsize * elements + storage + _staged_bytes(spec, storage) + bins


def _backward_bytes(spec: KernelSpec) -> int:
    """Return the bytes of the operands, and of dS and a part of dQ if the kernel computes dQ."""
    makes_dq = spec.dq_atomic_width > 0
    more = spec.block_q * (spec.block_kv + 2 * spec.head_dim) if makes_dq else 0
    return _walk_of_queries_bytes(spec, more, spec.num_stages)


def _backward_wide_bytes(spec: KernelSpec) -> int:
    """Return the bytes of the operands, with one stage of dO if more do not fit, of P and of both layouts of dS."""
    scores, do_elements = 3 * spec.block_q * spec.block_kv, spec.block_q * spec.value_dim
    elements = scores + spec.block_kv * (spec.head_dim + spec.value_dim)
    elements += spec.num_stages * (spec.block_q * spec.head_dim + do_elements)
    fits = spec.dtype.itemsize * elements + _STORAGE_BYTES <= _MAX_SHARED_BYTES
    return _walk_of_queries_bytes(spec, scores, spec.num_stages if fits else 1)


def _walk_of_keys_bytes(spec: KernelSpec) -> int:
    """Return the bytes of queries, of dO in a backward pass, of keys and values of all stages, and of tangents."""
    loads_do = spec.entry.loads_do
    is_small = spec.is_listed and spec.block_q == ROWS
    is_narrow = max(spec.head_dim, spec.value_dim) <= 128
    has_two = is_narrow and not is_small and not loads_do and not spec.score_is_staged and not spec.tangents
    q_stages, named = 1 + has_two, spec.tangents
    query_dims = spec.head_dim * (1 + ("q" in named)) + spec.value_dim * (loads_do + ("do" in named))
    key_dims = spec.head_dim * (1 + ("k" in named)) + spec.value_dim * (1 + ("v" in named))
    elements = q_stages * spec.block_q * query_dims + spec.num_stages * spec.block_kv * key_dims
    storage = storage_bytes(spec, q_stages)
    return spec.dtype.itemsize * elements + storage + _staged_bytes(spec, storage, _SLOT * (spec.block_q // ROWS))


def _second_columns_bytes(spec: KernelSpec) -> int:
    """Return the bytes of keys and values, of queries and dO of all stages, of tangents, statistics and messages."""
    named, stages = spec.tangents, spec.num_stages
    key_dims = spec.head_dim * (1 + ("k" in named)) + spec.value_dim * (1 + ("v" in named))
    query_dims = spec.head_dim * (1 + ("q" in named)) + spec.value_dim * (1 + ("do" in named))
    elements = spec.block_kv * key_dims + stages * spec.block_q * query_dims
    storage = stages * (4 * _SECOND_STATISTICS * spec.block_q + _SLOT + _SECOND_MESSAGE) + _SLOT
    return spec.dtype.itemsize * elements + storage


def _staged_bytes(spec: KernelSpec, storage: int, slot: int = 0) -> int:
    """Return the bytes of a staged array and its slots, for all stages: StagedArray of sm90/staged_array.cuh."""
    slots = spec.num_stages * (2 * spec.block_q * spec.block_kv + slot)
    return (slots + -storage % _ARRAY_ALIGNMENT) * spec.score_is_staged


def storage_bytes(spec: KernelSpec, q_stages: int) -> int:
    """Return the bytes of messages and barriers in kernels that loop over the keys of a query tile."""
    groups, stages = spec.block_q // ROWS, spec.num_stages
    tile_info = _TILE_INFO + _GROUP_RANGE * groups + _COORDS * spec.entry.loads_do
    storage = _SLOT * (q_stages + 2 * stages) + _NUM_TILE_INFOS * (_SLOT + -(-tile_info // 16) * 16)
    if spec.num_warps == 4 * (2 + groups):  # one warpgroup draws dropout's random bits
        words = spec.block_q * 2 * -(-spec.block_kv // 64)
        storage += _KEPT_STAGES * (_SLOT + 4 * words)
    message = _MEMBERS + _MESSAGE + _FLAGS * _WARPS if spec.packs_queries else _MESSAGE + _FLAGS * groups
    storage += (message + message % _MEMBERS * spec.packs_queries) * stages + _OTHER
    return storage + -storage % 16


def query_stats_words(spec: KernelSpec) -> int:
    """Return the words of a query tile's statistics: QueryStats of sm90/query_stats.cuh."""
    return 2 * spec.block_q + spec.block_q // 16 + 4


def query_record_words(spec: KernelSpec) -> int:
    """Return the words of a query tile's QueryRecord in global memory: the statistics, and a counter if needed."""
    return query_stats_words(spec) + _COUNT * (spec.last_finishes_dq or spec.adds_dq_in_order)


def _panels(spec: KernelSpec) -> tuple[int, int]:
    """Return the columns of boxes, each one panel of a WgmmaTile of tile/wgmma_tile.cuh."""
    head_panel, value_panel = (64 if dim % 64 == 0 else 32 for dim in (spec.head_dim, spec.value_dim))
    return head_panel, value_panel


def _mass_boxes(spec: KernelSpec) -> dict[str, tuple[int, int]]:
    return {"q": (spec.block_q, _panels(spec)[0]), "k": (spec.block_kv, _panels(spec)[0])}


def _forward_boxes(spec: KernelSpec) -> Boxes:
    value_panel = _panels(spec)[1]
    return _mass_boxes(spec) | {"v": (spec.block_kv, value_panel), "o": (ROWS // 4, value_panel)}  # o: rows of one warp


def _backward_boxes(spec: KernelSpec) -> dict[str, tuple[int, int]]:
    value_panel = _panels(spec)[1]
    return _mass_boxes(spec) | {"v": (spec.block_kv, value_panel), "do": (spec.block_q, value_panel)}


def _backward_wide_boxes(spec: KernelSpec) -> Boxes:
    halves = {"k": (spec.block_kv, 32)} if spec.head_dim % 128 else {}  # half of head_dim then consists of whole panels
    return _backward_boxes(spec) | halves


def _with_tangents(boxes: Boxes, spec: KernelSpec) -> Boxes:
    return {**boxes, **{f"{name}{DOT}": box for name, box in boxes.items() if name in spec.tangents}}


def _jvp_boxes(spec: KernelSpec) -> Boxes:
    return _with_tangents(_mass_boxes(spec) | {"v": (spec.block_kv, _panels(spec)[1])}, spec)


def _backward_jvp_boxes(spec: KernelSpec) -> Boxes:
    return _with_tangents(_backward_boxes(spec), spec)


FORWARD = Entry(
    family=SM90, name="forward", shared_bytes=_walk_of_keys_bytes, boxes=_forward_boxes, is_persistent=True,
    takes_order=True, applies_score=True, draws_dropout=True, has_exponentials=True, products=(1, 1),
)  # fmt: skip
JVP = Entry(
    family=SM90, name="jvp", shared_bytes=_walk_of_keys_bytes, boxes=_jvp_boxes, is_persistent=True,
    has_exponentials=True, products=(3, 2),
)  # fmt: skip
BACKWARD_JVP_ROWS = Entry(
    family=SM90, name="backward_jvp_rows", shared_bytes=_walk_of_keys_bytes, boxes=_backward_jvp_boxes, loads_do=True,
    is_persistent=True, has_exponentials=True, products=(5, 3),
)  # fmt: skip
BACKWARD_JVP_COLUMNS = Entry(
    family=SM90, name="backward_jvp_columns", shared_bytes=_second_columns_bytes, boxes=_backward_jvp_boxes,
    loads_do=True, holds_keys=True, has_exponentials=True, products=(5, 5),
)  # fmt: skip
BACKWARD = Entry(
    family=SM90, name="backward", shared_bytes=_backward_bytes, boxes=_backward_boxes, loads_do=True,
    is_persistent=True, takes_order=True, holds_keys=True, applies_score=True, adds_gradients=True,
    draws_dropout=True, can_finish_dq=True, has_exponentials=True, products=(3, 2),
)  # fmt: skip
BACKWARD_WIDE = Entry(
    family=SM90, name="backward_wide", shared_bytes=_backward_wide_bytes, boxes=_backward_wide_boxes,
    loads_do=True, is_persistent=True, takes_order=True, holds_keys=True, has_exponentials=True, products=(3, 2),
)  # fmt: skip
BACKWARD_ROWS = Entry(
    family=SM90, name="backward_rows", shared_bytes=_walk_of_keys_bytes, boxes=_backward_boxes, loads_do=True,
    is_persistent=True, has_exponentials=True, products=(2, 1),
)  # fmt: skip
BACKWARD_STATISTICS = Entry(
    family=SM90, name="backward_statistics", loads_do=True, query_record_words=query_record_words
)  # fmt: skip
CONVERT_DQ = Entry(family=SM90, name="convert_dq")
BLOCK_MASS = Entry(
    family=SM90, name="block_mass", shared_bytes=_mass_bytes, boxes=_mass_boxes, is_persistent=True,
    applies_score=True,
)  # fmt: skip
