"""Plans the kernels that attend from many new tokens to a KV cache where its pages lie: chunked prefill."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

import numpy as np

from ..arrays import ShapeDtype
from ._params import OF_RECORDS_WITHIN, PARAMS, TENSOR_MAPS, UNLIMITED
from .decoding import TABLES, CacheLayout, chunked_dim_reasons, window_numbers
from .device import DeviceSpec
from .families.family import FORWARD_INPUTS, launch_of
from .launches import BATCH_AXES, MATRICES, Feature, Launch, Pass, Workspace
from .problem import Problem
from .routing import FAMILIES
from .score_launches import with_score_argument
from .sinks import sink_forward
from .spec import SIMT, Entry, KernelSpec

_QUERY_INTERVALS = Entry(family="cache", name="query_intervals", runs_as=SIMT)
_POINTER = np.uint64
PAGES = np.dtype(
    [
        *((name, _POINTER) for name in TABLES),
        *((name, np.int32) for name in ("num_pages", "max_pages", "page_size", "capacity", "num_queries", "box_rows")),
    ],
    align=True,
)
QUERY_INTERVALS = np.dtype(
    [
        ("o", MATRICES),
        ("lse", MATRICES),
        ("pages", PAGES),
        *((name, _POINTER) for name in ("lo", "hi", "tile_counter")),
        *((name, np.int32) for name in ("num_heads", "value_dim", "left", "right", "blocks_per_sequence", "unused")),
    ],
    align=True,
)
# The kernel that makes intervals: its warps, rows of one head that a warp writes, and most blocks for a sequence.
_WARPS, _ROWS_OF_WARP, _MOST_BLOCKS = 8, 16, 64
_ROWS_OF_ONE_PAGE = 64
_LONG = 4096  # queries, of which tiles are as tall as they may be


def prefill_reasons(problem: Problem, device: DeviceSpec, family: str) -> list[str]:
    """Why a family's forward kernel does not attend to a cache where its pages lie."""
    reasons = FAMILIES[family].reasons(problem, device)
    if problem.seqlen_q < 1:
        reasons.append("q must have at least one row")
    return reasons + chunked_dim_reasons(problem)


def prefill_spec(problem: Problem, device: DeviceSpec, family: str) -> KernelSpec:
    """The family's kernel for a problem.

    Its tile is that of one head of many queries, whatever the problem has of them: results of a sequence have the same
    bits whatever else is in the batch, and however many rows the longest sequence has.
    """
    keys, values = (ShapeDtype((1, _LONG, dim), problem.dtype) for dim in (problem.head_dim, problem.value_dim))
    alike = Problem.of(keys, keys, values, scale=problem.softmax_scale)
    alike = replace(alike, operands=problem.operands, score=problem.score, numbers=problem.numbers)
    spec = FAMILIES[family].specs(alike, device)["forward"]
    # No elements of an array are staged: rows of Q stand elsewhere among its rows.
    return replace(spec, is_paged=True, has_sink=problem.operand("sink") is not None, score_is_staged=False)


def intervals_spec(dtype: np.dtype[np.generic], has_sink: bool = False) -> KernelSpec:
    """The kernel that says which keys each query sees, and writes results of queries that belong to no sequence."""
    return KernelSpec(
        entry=_QUERY_INTERVALS, dtype=dtype, head_dim=32, value_dim=32, block_q=16, block_kv=16,
        num_warps=_WARPS, min_blocks=1, has_sink=has_sink,
    )  # fmt: skip


def prefill_pass(
    problem: Problem, device: DeviceSpec, layout: CacheLayout, family: str, *, left: int | None, right: int | None
) -> Pass:
    """The launches for a problem that `prefill_reasons` has nothing against.

    Parameters
    ----------
    problem : Problem
        Of q [batch, num_heads, new tokens, head_dim], and of keys and values [batch, num_kv_heads, capacity, ...].
    family : str
        One of `routing.PREFILL_FAMILIES`.
    left, right : int, optional
        Keys before and after a query's own position that it sees; None is unlimited.
    """
    spec = prefill_spec(problem, device, family)
    batch, rows = problem.mask_shape.num_batch, problem.seqlen_q
    first = intervals_spec(problem.dtype, spec.has_sink)
    blocks = min(_MOST_BLOCKS, -(-rows * problem.num_heads // (_WARPS * _ROWS_OF_WARP)))
    number = np.dtype(np.int32)
    workspaces = {"lo": Workspace((batch, rows), number), "hi": Workspace((batch, rows), number)}
    if spec.entry.is_persistent:
        workspaces["tile_counter"] = Workspace((1,), number)
    intervals = Launch(
        spec=first, tiles=batch * blocks, reads=("lengths", "counts"), writes=("o", "lse", "num_faults", *workspaces),
        features=("intervals",),
    )  # fmt: skip
    # Rows of a box, which lies within one page: steps of keys start at multiples of their width. One page of all
    # positions has boxes of as many rows as are soon copied one by one, where a sequence ends.
    box_rows = gcd(spec.block_kv, _ROWS_OF_ONE_PAGE if layout.max_pages == 1 else layout.page_size)
    boxes = {
        name: (name, (box_rows if name in ("k", "v") else box[0], box[1])) for name, box in spec.boxes.items()
    }
    launch = launch_of(
        spec, device, batch * problem.num_heads * -(-rows // spec.block_q),
        (*FORWARD_INPUTS, "table", "lengths", "counts", *workspaces), ("o", "lse", "num_faults"),
        ("params", *["maps"] * bool(boxes)),
    )  # fmt: skip
    pages = {
        "num_pages": layout.num_pages, "max_pages": layout.max_pages, "page_size": layout.page_size,
        "capacity": layout.capacity, "num_queries": rows, "box_rows": box_rows,
    }  # fmt: skip
    numbers = {
        "pages": pages, "num_heads": problem.num_heads, "value_dim": problem.value_dim, "blocks_per_sequence": blocks,
        **window_numbers(layout, left, right),
    }  # fmt: skip
    of_pages = {f"pages.{name}": name for name in TABLES}
    features = (
        Feature("intervals", QUERY_INTERVALS, numbers, (*TABLES, *workspaces), names=of_pages),
        Feature("params", PARAMS, _params(problem, spec), ("tile_counter", "lo", "hi"), names=OF_RECORDS_WITHIN),
        *[Feature("maps", TENSOR_MAPS, boxes=boxes)] * bool(boxes), Feature("pages", PAGES, pages, TABLES),
    )  # fmt: skip
    kernels = Pass({"intervals": intervals, "forward": launch}, workspaces, features)
    kernels = with_score_argument(sink_forward(kernels, problem, "intervals", "forward"), problem, "forward")
    forward = kernels.launches["forward"]
    return replace(
        kernels, launches={**kernels.launches, "forward": replace(forward, features=(*forward.features, "pages"))}
    )


def _params(problem: Problem, spec: KernelSpec) -> dict[str, Any]:
    """The numbers of PARAMS: no mask depends on the batch, and thread blocks do not share tiles."""
    sizes = ("num_heads", "group_size", "seqlen_q", "seqlen_kv", "head_dim", "value_dim")
    shape = {
        "batch": (*[1] * (BATCH_AXES - 1), problem.mask_shape.num_batch), "softmax_scale": problem.kernel_scale,
        **{name: getattr(problem, name) for name in sizes},
        **dict.fromkeys(("heads_per_l2_group", "kv_heads_per_l2_group", "num_splits"), 1),
    }  # fmt: skip
    work = {
        "lower": -UNLIMITED, "upper": UNLIMITED, "interval_batch_stride": problem.seqlen_q, "block_q": spec.block_q,
        "block_kv": spec.block_kv,
    }  # fmt: skip
    return {"shape": shape, "work": work}
