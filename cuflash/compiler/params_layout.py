"""The records that launches hand to kernels by value mirror headers of `kernels_cu`, as static assertions check.

`assertions` turns the offsets of their fields into `static_assert`s, which are part of the text of every kernel.
"""

from __future__ import annotations

from collections.abc import Collection

from ..planning._params import NAIVE_MATRICES, PARAMS, PARTS, SHAPE, TENSOR_MAPS, WORK
from ..planning._result_kernels import COMPARISON, MERGE
from ..planning.appending import APPEND
from ..planning.captured_sums import CAPTURED_SUMS
from ..planning.block_mass import MASS_GRID
from ..planning.decoding import CACHE_PAGES, CACHE_SCALES, DECODE
from ..planning.dropout_launches import DROPOUT
from ..planning.families.fa1 import RUNNING
from ..planning.launches import MATRICES, TENSOR_MAP_PARAM
from ..planning.interval_kernels import INTERVAL_PARAMS
from ..planning.list_kernels import LIST_PARAMS
from ..planning.prefill import PAGES, QUERY_INTERVALS
from ..planning.scales import SCALES
from ..planning.selection_kernels import (
    CHOICE, CHOICES, CROSSINGS, DRAW, KEY_SCORES, PAGE_BOUNDS, POOLED_ROWS, POOLING, SLASH_SUMS, SPREAD, STRIDED_ROWS,
)  # fmt: skip
from ..planning.sinks import SINK

# Records by their namespace, and by the header that declares them or the field of a specification that adds them.
_RECORDS = {
    "lists": {
        "lists/params.cuh": {"Params": LIST_PARAMS},
        "lists/interval_params.cuh": {"IntervalParams": INTERVAL_PARAMS},
        "lists/selection.cuh": {
            "Choice": CHOICE, "Choices": CHOICES, "PooledRows": POOLED_ROWS, "Pooling": POOLING, "Draw": DRAW,
            "KeyScores": KEY_SCORES, "Crossings": CROSSINGS, "SlashSums": SLASH_SUMS, "Spread": SPREAD,
            "StridedRows": STRIDED_ROWS, "PageBounds": PAGE_BOUNDS,
        },
    },
    "results": {"results/params.cuh": {"Merge": MERGE, "Comparison": COMPARISON}},
    "attention": {
        "attention/params.cuh": {
            "Matrices": MATRICES, "Shape": SHAPE, "WorkList": WORK, "NaiveMatrices": NAIVE_MATRICES, "Parts": PARTS,
            "Params": PARAMS,
        },
        "sm90/tensor_maps.cuh": {"TensorMapParam": TENSOR_MAP_PARAM, "TensorMaps": TENSOR_MAPS},
        "has_sink": {"Sink": SINK},
        "has_dropout": {"Dropout": DROPOUT},
        "is_quantized": {"Scales": SCALES},
        "attention/decode_params.cuh": {"CachePages": CACHE_PAGES, "Decode": DECODE},
        "attention/append_params.cuh": {"Append": APPEND},
        "attention/cache_scales.cuh": {"CacheScales": CACHE_SCALES},
        "attention/mass_grid.cuh": {"MassGrid": MASS_GRID},
        "attention/captured_sums.cuh": {"CapturedSums": CAPTURED_SUMS},
        "fa1/running.cuh": {"Running": RUNNING},
        "attention/page_table.cuh": {"Pages": PAGES},
        "attention/query_intervals.cuh": {"QueryIntervals": QUERY_INTERVALS},
    },
}  # fmt: skip


def assertions(room: str, parts: Collection[str], *, host: bool = False) -> str:
    """C++ that stops NVRTC, or the host's compiler, where a record is not laid out as its NumPy twin.

    The records are those of the namespace `room` and of `parts`: the headers that a kernel includes, and the fields
    that its specification has.
    """
    records = {name: dtype for part, own in _RECORDS[room].items() if part in parts for name, dtype in own.items()}
    # NVRTC has no offsetof without headers, but the operator that its front end's own offsetof is made of.
    offset_of = "__builtin_offsetof({0}, {1})" if host else "__INTADDR__(&(({0}*)0)->{1})"
    lines = []
    for record, dtype in records.items():
        assert dtype.fields is not None
        for name, (field, offset, *_) in dtype.fields.items():
            member = "do_" if name == "do" else name
            rule = f"{offset_of.format(record, member)} == {offset} && sizeof({record}::{member}) == {field.itemsize}"
            lines.append(f'static_assert({rule}, "{record}.{name}");')
        lines.append(f'static_assert(sizeof({record}) == {dtype.itemsize}, "{record}");')
    if not lines:
        return ""
    return "\n".join([f"namespace cuflash::{room} {{", *lines, f"}}  // namespace cuflash::{room}", ""])
