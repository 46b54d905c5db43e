"""The record PARAMS, which all attention kernels take by value, and the record of tensor maps.

They mirror `kernels_cu/attention/params.cuh` and `kernels_cu/sm90/tensor_maps.cuh`.
"""

from __future__ import annotations

import numpy as np

from .launches import BATCH_AXES, MATRICES, TENSOR_MAP_PARAM, leaves
from .options import DOT
from .scales import SCALE_ARRAYS

UNLIMITED = 1 << 40  # exceeds every sequence length, but sums with it do not overflow
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
ARRAYS = ("q", "k", "v", "o", "lse", "do", "dq", "dk", "dv", "dlse", "delta", "dq_sum")
PARAMS = np.dtype(
    [
        *((name, MATRICES) for name in ARRAYS),
        ("tile_counter", _POINTER),
        ("shape", SHAPE),
        ("work", WORK),
    ],
    align=True,
)
TABLES = ("tile_counter", "lo", "hi", *LISTS)  # arrays of PARAMS that kernels receive without strides
OF_RECORDS_WITHIN = {path: path.rpartition(".")[2] for path in leaves(PARAMS) if "." in path}  # array names
TENSOR_MAP_ARRAYS = ("q", "k", "v", "do", "o")
# Kernels of the sm90 family take this record in addition to PARAMS.
TENSOR_MAPS = np.dtype([(name, TENSOR_MAP_PARAM) for name in TENSOR_MAP_ARRAYS])
# arrays with one number per row
ROW_VECTORS = (
    "lse", f"lse{DOT}", "dlse", f"dlse{DOT}", "delta", "delta.own", f"delta{DOT}", "query_stats", "lse_parts",
    *SCALE_ARRAYS,
)
HEAD_VECTORS = ("sink", f"sink{DOT}", "dsink")  # arrays with one number per head
