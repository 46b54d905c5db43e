"""Static assertions that the NumPy dtypes of kernel arguments have the layouts of the records in `kernels_cu` headers.

`assertions` turns the offsets and sizes of a dtype's fields into `static_assert`s, which every kernel's text contains.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..planning._params import PARAMS, SHAPE, TENSOR_MAPS, WORK
from ..planning._result_kernels import COMPARISON, MERGE, ROW_SUMS, ROWS
from ..planning.appending import APPEND, KEY_BOUNDS
from ..planning.captured_sums import CAPTURED_SUMS
from ..planning.block_mass import MASS_GRID
from ..planning.chosen_lists import CHOSEN_LISTS, CHOSEN_PARAMS
from ..planning.chosen_pages import CHOSEN_PAGES
from ..planning.decoding import CACHE_PAGES, CACHE_SCALES, DECODE
from ..planning.dropout_launches import DROPOUT
from ..planning.families._passes import QUERY_STATE
from ..planning.families.fa1 import RUNNING
from ..planning.families.naive import SCORE_MATRICES
from ..planning.families.sm80 import PARTS
from ..planning.few_queries import DECODE_PARTS
from ..planning.launches import MATRICES, TENSOR_MAP_PARAM
from ..planning.interval_kernels import INTERVAL_PARAMS
from ..planning.list_kernels import LIST_PARAMS
from ..planning.page_choice import PAGE_CHOICE
from ..planning.quantizing import QUANTIZED_ARRAY, TRANSPOSE
from ..planning.query_scores import QUERY_SCORES
from ..planning.prefill import PAGES, QUERY_INTERVALS
from ..planning.scales import SCALES
from ..planning.selection_kernels import (
    CHOICE, CHOICES, CROSSINGS, DRAW, KEY_SCORES, PAGE_BOUNDS, POOLED_ROWS, POOLING, SLASH_SUMS, SPREAD, STRIDED_ROWS,
)  # fmt: skip
from ..planning.sinks import SINK
from ..planning.tangent_launches import TANGENTS

# The records that each header declares. The namespace of a record is the folder of its header.
_RECORDS: dict[str, dict[str, np.dtype[np.generic]]] = {
    "lists/params.cuh": {"Params": LIST_PARAMS},
    "lists/interval_params.cuh": {"IntervalParams": INTERVAL_PARAMS},
    "lists/chosen.cuh": {"ChosenParams": CHOSEN_PARAMS},
    "lists/selection.cuh": {
        "Choice": CHOICE, "Choices": CHOICES, "PooledRows": POOLED_ROWS, "Pooling": POOLING, "Draw": DRAW,
        "KeyScores": KEY_SCORES, "Crossings": CROSSINGS, "SlashSums": SLASH_SUMS, "Spread": SPREAD,
        "StridedRows": STRIDED_ROWS, "PageBounds": PAGE_BOUNDS,
    },
    "lists/page_choice.cuh": {"PageChoice": PAGE_CHOICE},
    "lists/query_scores.cuh": {"QueryScores": QUERY_SCORES},
    "results/params.cuh": {"Merge": MERGE, "Comparison": COMPARISON, "Rows": ROWS, "RowSums": ROW_SUMS},
    "attention/params.cuh": {
        "Matrices": MATRICES, "Shape": SHAPE, "WorkList": WORK, "Params": PARAMS,
    },
    "attention/chosen_lists.cuh": {"ChosenLists": CHOSEN_LISTS},
    "attention/chosen_pages.cuh": {"ChosenPages": CHOSEN_PAGES},
    "attention/sink.cuh": {"Sink": SINK},
    "attention/tangents.cuh": {"Tangents": TANGENTS},
    "attention/dropout.cuh": {"Dropout": DROPOUT},
    "attention/scales.cuh": {"Scales": SCALES},
    "attention/decode_params.cuh": {"CachePages": CACHE_PAGES, "Decode": DECODE, "DecodeParts": DECODE_PARTS},
    "attention/append_params.cuh": {"Append": APPEND, "KeyBounds": KEY_BOUNDS},
    "attention/cache_scales.cuh": {"CacheScales": CACHE_SCALES},
    "attention/mass_grid.cuh": {"MassGrid": MASS_GRID},
    "attention/captured_sums.cuh": {"CapturedSums": CAPTURED_SUMS},
    "attention/page_table.cuh": {"Pages": PAGES},
    "attention/query_intervals.cuh": {"QueryIntervals": QUERY_INTERVALS},
    "attention/quantize_params.cuh": {"QuantizedArray": QUANTIZED_ARRAY, "Transpose": TRANSPOSE},
    "fa1/running.cuh": {"Running": RUNNING},
    "naive/score_matrices.cuh": {"ScoreMatrices": SCORE_MATRICES},
    "sm80/parts.cuh": {"Parts": PARTS},
    "sm90/query_state.cuh": {"QueryState": QUERY_STATE},
    "sm90/tensor_maps.cuh": {"TensorMapParam": TENSOR_MAP_PARAM, "TensorMaps": TENSOR_MAPS},
}  # fmt: skip


def assertions(headers: Collection[str], *, host: bool = False) -> str:
    """Return C++ that does not compile if the layout of a record in these headers differs from that of its NumPy dtype.

    `host` is true for the compiler of the host, and false for NVRTC.
    """
    # Without headers NVRTC has no offsetof, but it has the built-in operator that offsetof expands to.
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
