"""The record that a launch hands to a kernel by value, as NumPy lays it out.

It mirrors `kernels_cu/attention/params.cuh`: `assertions` turns the offsets into `static_assert`s, which are part of
the text of every kernel that takes it.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..planning.appending import APPEND
from ..planning.captured_sums import CAPTURED_SUMS
from ..planning.block_mass import MASS_GRID
from ..planning.decoding import CACHE_PAGES, CACHE_SCALES, DECODE
from ..planning.dropout_launches import DROPOUT
from ..planning.families.fa1 import RUNNING
from ..planning.launches import BATCH_AXES, MATRICES, TENSOR_MAP_PARAM
from ..planning.interval_kernels import INTERVAL_PARAMS
from ..planning.list_kernels import LIST_PARAMS
from ..planning.prefill import PAGES, QUERY_INTERVALS
from ..planning.scales import SCALES, SCALE_ARRAYS
from ..planning.selection_kernels import (
    CHOICE, CHOICES, CROSSINGS, DRAW, KEY_SCORES, PAGE_BOUNDS, POOLED_ROWS, POOLING, SLASH_SUMS, SPREAD, STRIDED_ROWS,
)  # fmt: skip
from ..planning.sinks import SINK

_POINTER = np.uint64
SHAPE = np.dtype(
    [
        ("batch", np.int32, (BATCH_AXES,)),
        *((name, np.int32) for name in ("first_batch", "num_heads", "group_size", "seqlen_q", "seqlen_kv")),
        *(
            (name, np.int32)
            for name in ("head_dim", "value_dim", "heads_per_l2_group", "kv_heads_per_l2_group", "num_splits")
        ),
        *((name, np.int32) for name in ("num_fused_dq_heads", "last_tile_lead", "first_tile_lag")),
        ("softmax_scale", np.float64),
    ],
    align=True,
)
LISTS = (
    "row_pointers", "kv_blocks", "q_blocks", "kinds", "tiles", "bits", "column_pointers", "column_entries",
    "column_steps", "row_order", "column_order",
)  # fmt: skip
WORK = np.dtype(
    [
        ("lower", np.int64),
        ("upper", np.int64),
        ("lo", _POINTER),
        ("hi", _POINTER),
        ("interval_batch_stride", np.int64),
        ("interval_head_stride", np.int64),
        *((name, _POINTER) for name in LISTS),
        *((name, np.int32) for name in ("list_batch_stride", "list_head_stride")),
        *((name, np.int32) for name in ("block_q", "block_kv", "num_q_blocks", "num_kv_blocks")),
    ],
    align=True,
)
ARRAYS = ("q", "k", "v", "o", "lse", "do", "dq", "dk", "dv", "dlse", "delta", "dq_sum", "tile_counter")
NAIVE_ARRAYS = ("scores", "score_gradients")  # arrays of the naive kernels
NAIVE_MATRICES = np.dtype([(name, MATRICES) for name in NAIVE_ARRAYS], align=True)
PART_ARRAYS = ("o_parts", "lse_parts")  # results of blocks that share a tile's keys
PARTS = np.dtype([(name, MATRICES) for name in PART_ARRAYS], align=True)
PARAMS = np.dtype(
    [
        *((name, MATRICES) for name in ARRAYS),
        ("shape", SHAPE),
        ("work", WORK),
        ("naive", NAIVE_MATRICES),
        ("parts", PARTS),
    ],
    align=True,
)
TENSOR_MAP_ARRAYS = ("q", "k", "v", "do", "o")
# beside PARAMS, to kernels of the sm90 family
TENSOR_MAPS = np.dtype([(name, TENSOR_MAP_PARAM) for name in TENSOR_MAP_ARRAYS])
ROW_VECTORS = ("lse", "dlse", "delta", "lse_parts", "tile_counter", *SCALE_ARRAYS)  # one number a row
HEAD_VECTORS = ("sink", "dsink")  # one number a head
# Records by the header that declares them, whose folder is their namespace.
_RECORDS = {
    "lists/params.cuh": {"Params": LIST_PARAMS},
    "lists/interval_params.cuh": {"IntervalParams": INTERVAL_PARAMS},
    "lists/selection.cuh": {
        "Choice": CHOICE, "Choices": CHOICES, "PooledRows": POOLED_ROWS, "Pooling": POOLING, "Draw": DRAW,
        "KeyScores": KEY_SCORES, "Crossings": CROSSINGS, "SlashSums": SLASH_SUMS, "Spread": SPREAD,
        "StridedRows": STRIDED_ROWS, "PageBounds": PAGE_BOUNDS,
    },
    "attention/params.cuh": {
        "Matrices": MATRICES, "Shape": SHAPE, "WorkList": WORK, "NaiveMatrices": NAIVE_MATRICES, "Parts": PARTS,
        "Params": PARAMS,
    },
    "attention/sink.cuh": {"Sink": SINK},
    "attention/dropout.cuh": {"Dropout": DROPOUT},
    "attention/scales.cuh": {"Scales": SCALES},
    "attention/decode_params.cuh": {"CachePages": CACHE_PAGES, "Decode": DECODE},
    "attention/append_params.cuh": {"Append": APPEND},
    "attention/cache_scales.cuh": {"CacheScales": CACHE_SCALES},
    "attention/mass_grid.cuh": {"MassGrid": MASS_GRID},
    "attention/captured_sums.cuh": {"CapturedSums": CAPTURED_SUMS},
    "attention/page_table.cuh": {"Pages": PAGES},
    "attention/query_intervals.cuh": {"QueryIntervals": QUERY_INTERVALS},
    "fa1/running.cuh": {"Running": RUNNING},
    "sm90/tensor_maps.cuh": {"TensorMapParam": TENSOR_MAP_PARAM, "TensorMaps": TENSOR_MAPS},
}  # fmt: skip


def assertions(headers: Collection[str], *, host: bool = False) -> str:
    """Return C++ that stops a compiler where a record of a header is not laid out as its NumPy twin.

    `host` is true for the host's compiler, and false for NVRTC.
    """
    # NVRTC has no offsetof without headers, but the operator that its front end's own offsetof is made of.
    offset_of = "__builtin_offsetof({0}, {1})" if host else "__INTADDR__(&(({0}*)0)->{1})"
    lines = []
    for header in sorted(_RECORDS.keys() & set(headers)):
        namespace = f"cuflash::{header.partition('/')[0]}"
        lines.append(f"namespace {namespace} {{")
        for record, dtype in _RECORDS[header].items():
            assert dtype.fields is not None
            for name, (field, offset, *_) in dtype.fields.items():
                member = "do_" if name == "do" else name
                is_placed = f"{offset_of.format(record, member)} == {offset}"
                rule = f"{is_placed} && sizeof({record}::{member}) == {field.itemsize}"
                lines.append(f'static_assert({rule}, "{record}.{name}");')
            lines.append(f'static_assert(sizeof({record}) == {dtype.itemsize}, "{record}");')
        lines.append(f"}}  // namespace {namespace}")
    return "\n".join([*lines, ""])
