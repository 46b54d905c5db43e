"""Plans of attention with few queries: a forward pass in which thread blocks split the keys among themselves."""

from __future__ import annotations

from dataclasses import replace

from ..blocks.work_list import IntervalWork, WorkList
from .chosen_lists import UnionWork
from .decoding import chunked_dim_reasons, decode_spec, part_workspaces, parts_of
from .device import DeviceSpec
from .families.family import FORWARD_INPUTS, Request, resident_blocks
from .families.sm80 import DECODING
from .launches import POINTER, Feature, Kernels, Launch, Pass, structure
from .problem import FP8, Problem
from .routing import FAMILIES
from .sinks import sink_forward
from .spec import SM80
from .split_kv import max_steps

# Limits of the number of rows, which are the queries of all heads that share a key/value head. On an H200, the decode
# loop is the fastest up to 8 rows, and sm80's split-KV kernels for more rows: experiments/results/plain_decode.csv.
_MOST_DECODED, _MOST_ROWS = 8, 64
FEW_QUERIES_ENTRY = replace(DECODING, name="few_queries", has_exponentials=True, products=(1, 1))
_TABLES = ("o_parts", "stats_parts", "arrivals")
DECODE_PARTS = structure((POINTER, *_TABLES))


def with_few_queries(kernels: Kernels, problem: Problem, device: DeviceSpec, work: WorkList) -> Kernels:
    """Replace the forward pass if there are few queries and each attends to an interval of keys.

    The new pass is the decode loop over arrays if that serves the problem, and otherwise sm80's split-KV kernels.
    """
    if not isinstance(work, IntervalWork) or isinstance(work, UnionWork) or problem.precision == FP8:
        return kernels
    rows, shape = problem.group_size * problem.seqlen_q, problem.mask_shape
    if not 1 <= rows <= _MOST_ROWS or 0 in (shape.num_batch, shape.seqlen_kv):
        return kernels
    if FAMILIES[SM80].reasons(problem, device):
        return kernels
    if rows <= _MOST_DECODED and _is_decoded(problem, work):
        return _decoded(kernels, problem, device, work)
    other = FAMILIES[SM80].launches(Request.over(problem, device, work), work)
    if other.forward.specs == kernels.forward.specs:
        return kernels
    return replace(kernels, forward=other.forward, num_splits=other.num_splits)


def _is_decoded(problem: Problem, work: IntervalWork) -> bool:
    """True if the decode loop serves a problem: heads of a tile share keys, and rows consist of whole chunks."""
    if problem.dropout is not None or problem.group_size > 1 and work.lo is not None and work.lo.shape[1] > 1:
        return False
    return not chunked_dim_reasons(problem)


def _decoded(kernels: Kernels, problem: Problem, device: DeviceSpec, work: WorkList) -> Kernels:
    """Return the kernels with a forward pass of one launch, whose thread blocks also merge the parts that they compute.

    The number of parts is limited to the thread blocks that the GPU holds at once, since more parts would only add
    work for merging.
    """
    spec = replace(decode_spec(problem, device), entry=FEW_QUERIES_ENTRY)
    pairs = problem.mask_shape.num_batch, problem.num_kv_heads
    at_once = max(1, resident_blocks(spec, device) // (pairs[0] * pairs[1]))
    num_parts = min(parts_of(problem, device, max_steps(problem, work, spec)), at_once)
    workspaces = part_workspaces(pairs, problem.group_size * problem.seqlen_q, spec, num_parts)
    launch = Launch(
        spec=spec, tiles=problem.num_kv_heads * num_parts, reads=FORWARD_INPUTS, writes=("o", "lse", *workspaces),
        features=("decode_parts",),
    )  # fmt: skip
    feature = Feature("decode_parts", DECODE_PARTS, tables=_TABLES)
    forward = sink_forward(Pass({"forward": launch}, workspaces, (feature,)), problem, "forward")
    return replace(kernels, forward=forward, num_splits=num_parts)
