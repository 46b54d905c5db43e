"""Shared memory of the sm80 family's kernels, counted from their specifications."""

from __future__ import annotations

from ..spec import KernelSpec

MOST_PARTS = 128  # maximum number of parts of a sequence in decode kernels
_WORK_TILE, _VISIT_RANGE, _SCALE, _POINTER, _FLAG = 28, 24, 4, 8, 8  # bytes of a thread block's state in shared memory
_CHUNK, _MATRIX = 20, 32  # bytes of a step and of an operand in the block mass kernel
_STATISTICS = 4  # numbers per query that kernels for tangents of gradients store in shared memory
_STATE = _WORK_TILE + _VISIT_RANGE + _SCALE + _FLAG


def forward_bytes(spec: KernelSpec) -> int:
    """Return the bytes of queries, whose tile also stages o, and of keys and values."""
    elements = spec.block_q * max(spec.head_dim, spec.value_dim) + spec.block_kv * (spec.head_dim + spec.value_dim)
    return spec.dtype.itemsize * elements + 2 * _POINTER + _STATE


def rows_bytes(spec: KernelSpec) -> int:
    """Return the bytes of queries and dO, and of keys and values of all stages."""
    elements = (spec.block_q + spec.num_stages * spec.block_kv) * (spec.head_dim + spec.value_dim)
    return spec.dtype.itemsize * elements + 2 * _POINTER + _STATE


def jvp_bytes(spec: KernelSpec) -> int:
    """Return the bytes of queries, whose tile also stages o_dot, of keys and values, and of their tangents."""
    head_dim, value_dim, named = spec.head_dim, spec.value_dim, spec.tangents
    rows_of_q = max(head_dim, value_dim) + head_dim * ("q" in named)
    rows_of_k = head_dim * (1 + ("k" in named)) + value_dim * (spec.moves_scores + ("v" in named))
    elements = spec.block_q * rows_of_q + spec.block_kv * rows_of_k
    return spec.dtype.itemsize * elements + 4 * _POINTER + _STATE


def backward_jvp_bytes(spec: KernelSpec) -> int:
    """Return the bytes of queries, dO, keys, values and their tangents, and of the statistics of queries."""
    of_queries, of_keys = _tangent_rows(spec)
    elements = spec.block_q * of_queries + spec.block_kv * of_keys
    return spec.dtype.itemsize * elements + 4 * _STATISTICS * spec.block_q


def _tangent_rows(spec: KernelSpec) -> tuple[int, int]:
    """Return the columns of all operands of a query, and of a key, with their tangents."""
    head_dim, value_dim, named = spec.head_dim, spec.value_dim, spec.tangents
    of_queries = head_dim * (1 + ("q" in named)) + value_dim * (1 + ("do" in named))
    return of_queries, head_dim * (1 + ("k" in named)) + value_dim * (1 + ("v" in named))


def backward_bytes(spec: KernelSpec) -> int:
    """Return the bytes of keys and values, of queries, dO and their statistics for all stages, and of P and dS."""
    rows = spec.block_kv + spec.num_stages * spec.block_q
    elements = rows * (spec.head_dim + spec.value_dim) + 2 * spec.block_q * spec.block_kv
    return spec.dtype.itemsize * elements + 2 * 4 * spec.num_stages * spec.block_q + 5 * _POINTER + _STATE


def convert_bytes(spec: KernelSpec) -> int:
    """Return the bytes of a tile of rounded dQ."""
    return spec.dtype.itemsize * spec.block_q * spec.head_dim


def combine_bytes(spec: KernelSpec) -> int:
    """Return the bytes of the sums of all groups of threads."""
    return (8 if spec.value_dim > 192 else 16) * spec.value_dim * 4


def mass_bytes(spec: KernelSpec) -> int:
    """Return the bytes of queries and keys of all stages, and of the queries' lse."""
    slots = spec.num_stages * (spec.block_kv + spec.splits_head_dim * spec.block_q)
    rows = slots + (0 if spec.splits_head_dim else spec.block_q)
    state = 4 * (spec.block_q + 1) + _WORK_TILE + _VISIT_RANGE + spec.num_stages * _CHUNK
    return spec.dtype.itemsize * rows * spec.head_dim + state + -state % _POINTER + 2 * _MATRIX


def decode_bytes(spec: KernelSpec) -> int:
    """Return the bytes of queries, and of keys and values of all stages."""
    return _queries_and_stages(spec, (spec.head_dim + spec.value_dim) * spec.dtype.itemsize)


def decode_e4m3_bytes(spec: KernelSpec) -> int:
    """Return the same as `decode_bytes` for FP8 rows, including a scale for each row of keys and of values."""
    return _queries_and_stages(spec, spec.head_dim + spec.value_dim + 2 * _SCALE)


def _queries_and_stages(spec: KernelSpec, row: int) -> int:
    return spec.block_q * spec.head_dim * spec.dtype.itemsize + spec.num_stages * spec.block_kv * row
