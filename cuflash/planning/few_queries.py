"""Plans of attention with few queries: the loop of the decode kernels over keys and values in arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..blocks.work_list import IntervalWork, WorkList
from .chosen_lists import UnionWork
from .decoding import chunked_dim_reasons, decode_spec, part_workspaces, parts_of
from .device import DeviceSpec
from .families.family import FORWARD_INPUTS
from .families.sm80 import DECODING
from .launches import Feature, Kernels, Launch, Pass
from .problem import Problem
from .routing import FAMILIES
from .sinks import sink_forward
from .split_kv import max_steps

FEW_QUERIES = "; forward, its few queries are decoded"  # what a plan's rule says of the kernel
_MOST_ROWS = 16  # rows of a tile, the queries of a group of heads, up to which the kernel is used
FEW_QUERIES_ENTRY = replace(DECODING, name="few_queries", has_exponentials=True, products=(1, 1))
_TABLES = ("o_parts", "stats_parts", "arrivals")
DECODE_PARTS = np.dtype([(name, np.uint64) for name in _TABLES], align=True)


def takes_few_queries(problem: Problem, device: DeviceSpec, work: WorkList) -> bool:
    """True if the kernel for few queries serves a problem's forward pass, faster than kernels for any number of them.

    The rows of its tile are the queries of all heads that share a key/value head, which must attend the same keys.
    """
    if not isinstance(work, IntervalWork) or isinstance(work, UnionWork) or problem.dropout is not None:
        return False
    rows, shape = problem.group_size * problem.seqlen_q, problem.mask_shape
    if not 1 <= rows <= _MOST_ROWS or 0 in (shape.num_batch, shape.seqlen_kv):
        return False
    if problem.group_size > 1 and work.lo is not None and work.lo.shape[1] > 1:
        return False
    return not FAMILIES[DECODING.family].reasons(problem, device) and not chunked_dim_reasons(problem)


def with_few_queries(kernels: Kernels, problem: Problem, device: DeviceSpec, work: WorkList) -> Kernels:
    """Return the kernels with a forward pass for few queries: one launch, whose blocks also merge their parts."""
    spec = replace(decode_spec(problem, device), entry=FEW_QUERIES_ENTRY)
    num_parts = parts_of(problem, device, max_steps(problem, work, spec))
    pairs = problem.mask_shape.num_batch, problem.num_kv_heads
    workspaces = part_workspaces(pairs, problem.group_size * problem.seqlen_q, spec, num_parts)
    launch = Launch(
        spec=spec, tiles=problem.num_kv_heads * num_parts, reads=FORWARD_INPUTS, writes=("o", "lse", *workspaces),
        features=("decode_parts",),
    )  # fmt: skip
    feature = Feature("decode_parts", DECODE_PARTS, tables=_TABLES)
    forward = sink_forward(Pass({"forward": launch}, workspaces, (feature,)), problem, "forward")
    return replace(kernels, forward=forward, num_splits=num_parts)
