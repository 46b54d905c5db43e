"""Plans of chunked prefill: kernels in which many new tokens attend to a KV cache and read its pages in place."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import numpy as np

from ..arrays import ShapeDtype
from ._params import OF_RECORDS_WITHIN, PARAMS, TENSOR_MAPS, UNLIMITED
from .decoding import TABLES, CacheLayout, chunked_dim_reasons, scale_reasons, window_numbers
from .device import DeviceSpec
from .families.family import FORWARD_INPUTS, Request, launch_of
from .launches import MATRICES, POINTER, Feature, Launch, Pass, Value, Workspace, over_batch, structure
from .problem import Problem
from .routing import FAMILIES
from .score_launches import with_score_argument
from .sinks import sink_forward
from .spec import SIMT, Entry, KernelSpec, smallest

_QUERY_INTERVALS = Entry(family="cache", name="query_intervals", runs_as=SIMT)
PAGES = structure(
    (POINTER, *TABLES),
    (np.int32, "num_pages", "max_pages", "page_size", "capacity", "num_queries", "box_rows"),
)
QUERY_INTERVALS = structure(
    (MATRICES, "o", "lse"),
    (PAGES, "pages"),
    (POINTER, "lo", "hi", "tile_counter"),
    (np.int32, "num_heads", "value_dim", "left", "right", "blocks_per_sequence", "unused"),
)
# For the kernel query_intervals: warps, rows of one head per warp, and maximum number of thread blocks per sequence.
_WARPS, _ROWS_OF_WARP, _MOST_BLOCKS = 8, 16, 64
_ROWS_OF_ONE_PAGE = 64
_LONG = 4096  # number of queries for which families choose their tallest tiles


def prefill_reasons(problem: Problem, device: DeviceSpec, family: str) -> list[str]:
    """Return why a family's forward kernel cannot serve a problem on the pages of a cache."""
    reasons = FAMILIES[family].reasons(problem, device)
    if problem.seqlen_q < 1:
        reasons.append("q must have at least one row")
    return reasons + chunked_dim_reasons(problem) + scale_reasons(problem)


def prefill_spec(problem: Problem, device: DeviceSpec, family: str) -> KernelSpec:
    """Return the family's kernel for a problem.

    Its tile is always the one for a single head with many queries, so that the bits of a sequence's results depend
    neither on the batch nor on the length of the longest sequence.
    """
    keys, values = (ShapeDtype((1, _LONG, dim), problem.dtype) for dim in (problem.head_dim, problem.value_dim))
    long_problem = Problem.of(keys, keys, values, scale=problem.softmax_scale)
    long_problem = replace(long_problem, operands=problem.operands, score=problem.score, numbers=problem.numbers)
    spec = FAMILIES[family].specs(Request(long_problem, device))["forward"]
    # Arrays of score functions are not staged, because their rows are positions in a sequence, unlike the rows of Q.
    return replace(spec, is_paged=True, has_sink=problem.operand("sink") is not None, score_is_staged=False)


def intervals_spec(dtype: np.dtype[np.generic], has_sink: bool = False) -> KernelSpec:
    """Return the kernel that computes each query's interval of keys, and writes results of rows outside sequences."""
    return replace(smallest(_QUERY_INTERVALS, dtype, _WARPS), has_sink=has_sink)


def prefill_pass(
    problem: Problem, device: DeviceSpec, layout: CacheLayout, family: str, *, left: int | None, right: int | None
) -> Pass:
    """Return the launches for a problem without `prefill_reasons`.

    Parameters
    ----------
    problem : Problem
        The problem of q [batch, num_heads, new tokens, head_dim] and of keys and values
        [batch, num_kv_heads, capacity, ...].
    family : str
        One of `routing.PREFILL_FAMILIES`.
    left, right : int, optional
        Keys before and after a query's own position that it attends to; None is unlimited.
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
    # A box must be within one page. Since steps start at multiples of block_kv, the rows of a box divide block_kv and
    # the page size. If a sequence has a single page, small boxes leave fewer rows at its end that are copied singly.
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
    numbers: dict[str, Value] = {
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
    kernels = with_score_argument(sink_forward(kernels, problem, "intervals", "forward"), problem)
    return kernels.changed(lambda role, launch: launch.taking("pages") if role == "forward" else launch)


def _params(problem: Problem, spec: KernelSpec) -> dict[str, Value]:
    """Return the numbers in PARAMS for one interval per query, which all heads share, without split-KV."""
    sizes = ("num_heads", "group_size", "seqlen_q", "seqlen_kv", "head_dim", "value_dim")
    shape = {
        "batch": over_batch((problem.mask_shape.num_batch,), 1), "softmax_scale": problem.kernel_scale,
        **{name: getattr(problem, name) for name in sizes},
        **dict.fromkeys(("heads_per_l2_group", "kv_heads_per_l2_group", "num_splits"), 1),
    }  # fmt: skip
    work = {
        "lower": -UNLIMITED, "upper": UNLIMITED, "interval_batch_stride": problem.seqlen_q, "block_q": spec.block_q,
        "block_kv": spec.block_kv,
    }  # fmt: skip
    return {"shape": shape, "work": work}
