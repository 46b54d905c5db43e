"""The record PARAMS, which all attention kernels take by value, and the record of tensor maps.

They mirror `kernels_cu/attention/params.cuh` and `kernels_cu/sm90/tensor_maps.cuh`.
"""

import numpy as np

from .launches import BATCH, MATRICES, POINTER, TENSOR_MAP_PARAM, leaves, structure
from .options import DOT
from .scales import SCALE_ARRAYS

UNLIMITED = 1 << 40  # exceeds every sequence length, but sums with it do not overflow
SHAPE = structure(
    (BATCH, "batch"),
    (np.int32, "first_batch", "num_heads", "group_size", "seqlen_q", "seqlen_kv", "head_dim", "value_dim"),
    (np.int32, "heads_per_l2_group", "kv_heads_per_l2_group", "num_splits"),
    (np.int32, "num_fused_dq_heads", "last_tile_lead", "first_tile_lag"),
    (np.float64, "softmax_scale"),
)
LISTS = (
    "row_pointers", "kv_blocks", "q_blocks", "kinds", "tiles", "bits", "column_pointers", "column_entries",
    "column_steps", "row_order", "column_order",
)  # fmt: skip
WORK = structure(
    (np.int64, "lower", "upper"),
    (POINTER, "lo", "hi"),
    (np.int64, "interval_batch_stride", "interval_head_stride"),
    (POINTER, *LISTS),
    (np.int32, "list_batch_stride", "list_head_stride", "block_q", "block_kv", "num_q_blocks", "num_kv_blocks"),
)
ARRAYS = ("q", "k", "v", "o", "lse", "do", "dq", "dk", "dv", "dlse", "delta", "dq_sum")
PARAMS = structure((MATRICES, *ARRAYS), (POINTER, "tile_counter"), (SHAPE, "shape"), (WORK, "work"))
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
