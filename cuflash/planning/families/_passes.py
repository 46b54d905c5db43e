"""Passes shared by several families: a forward pass of one kernel, and a backward pass that starts with statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from ...blocks.work_list import IntervalWork, WorkList
from ..launches import MATRICES, POINTER, DqSemaphoreOrder, Feature, Launch, Pass, Workspace, structure
from ..options import DOT
from ..sinks import sink_backward, sink_forward
from ..spec import SIMT, Entry, KernelSpec
from ..tangent_launches import DELTA
from .family import (
    BACKWARD_INPUTS, FORWARD_INPUTS, STATISTICS_INPUTS, Request, key_tiles, launch_of, launch_over, num_tiles,
    query_tiles,
)  # fmt: skip

# Statistics of queries and semaphores of dQ that sm90 kernels share; mirrors kernels_cu/sm90/query_state.cuh.
QUERY_STATE = structure((MATRICES, "query_stats"), (POINTER, "dq_semaphores"))
_COUNTS = 2  # counters in the semaphore of a head
_SECOND_STATISTICS = Entry(family=SIMT, name="backward_jvp_statistics", loads_do=True)
_STATISTICS_ROWS = 16  # rows of a block of that kernel, whose threads share no other rows


def tile_counters(spec: KernelSpec, *, is_zeroed: bool = False) -> dict[str, Workspace]:
    """Return the workspace with the number of the next tile for persistent blocks; empty for other kernels."""
    return {"tile_counter": Workspace((1,), np.dtype(np.int32), is_zeroed)} if spec.entry.is_persistent else {}


def forward_pass(
    request: Request, work: WorkList, spec: KernelSpec, reads: tuple[str, ...] = FORWARD_INPUTS
) -> Pass:
    """Return a forward pass of one kernel, with its workspace and its sink."""
    counters = tile_counters(spec, is_zeroed=True)
    launch = launch_over(spec, request, work, reads, ("o", "lse", *counters))
    return sink_forward(Pass({"forward": launch}, counters), request.problem, "forward")


def jvp_pass(request: Request, work: WorkList, spec: KernelSpec) -> Pass:
    """Return a pass of one kernel that computes the tangents of o and lse; `spec` names the tangents."""
    tangents = [name for name in spec.tangents if name != "score"]
    moves_means = spec.moves_scores or "sink" in tangents
    reads = ("q", "k", *("v",) * spec.moves_scores, *("o",) * moves_means, "lse")
    counters = tile_counters(spec, is_zeroed=True)
    reads, writes = (*reads, *(f"{name}{DOT}" for name in tangents)), (f"o{DOT}", f"lse{DOT}", *counters)
    kernels = Pass({"jvp": launch_over(spec, request, work, reads, writes)}, counters)
    return sink_forward(kernels, request.problem, "jvp") if moves_means else kernels


def second_statistics_spec(rows: KernelSpec) -> KernelSpec:
    """Return the kernel that computes delta and its tangent for the kernel `rows` of any family."""
    return KernelSpec(
        entry=_SECOND_STATISTICS, dtype=rows.dtype, head_dim=rows.head_dim, value_dim=rows.value_dim,
        block_q=_STATISTICS_ROWS, block_kv=_STATISTICS_ROWS, tangents=rows.tangents,
    )  # fmt: skip


def backward_jvp_pass(request: Request, work: WorkList, rows: KernelSpec, columns: KernelSpec) -> Pass:
    """Return a pass that computes the tangents of gradients; its first kernel computes delta and its tangent."""
    problem = request.problem
    dots = [f"{name}{DOT}" for name in rows.tangents if name not in ("score", "sink")]
    deltas, counters = (DELTA, f"delta{DOT}"), tile_counters(rows)
    inputs = ("q", "k", "v", "do", "lse", f"lse{DOT}", *dots, *deltas)
    statistics = second_statistics_spec(rows)
    do_dot = (f"do{DOT}",) * ("do" in rows.tangents)
    of_queries = ("do", *do_dot, "o", f"o{DOT}", "lse", f"lse{DOT}", "dlse", f"dlse{DOT}")
    first = launch_over(statistics, request, work, of_queries, (*deltas, *counters))
    launches = {
        statistics.entry.name: first,
        rows.entry.name: launch_over(rows, request, work, (*inputs, *counters), ("dq", *counters)),
        columns.entry.name: launch_over(columns, request, work, inputs, ("dk", "dv")),
    }  # fmt: skip
    workspace = Workspace(problem.lse_shape(), problem.accumulator)
    kernels = Pass(launches, dict.fromkeys(deltas, workspace) | counters)
    if "sink" not in problem.wrt:
        return kernels
    reads = ("sink", *(f"sink{DOT}",) * ("sink" in rows.tangents))
    launches[statistics.entry.name] = first.taking("sink", reads=reads, writes=("delta",), has_sink=True)
    kernels = sink_backward(replace(kernels, workspaces={**kernels.workspaces, "delta": workspace}), problem)
    roles = {"sink_gradient": "backward_jvp_sink"}  # a plan's passes must not share a role
    return replace(kernels, launches={roles.get(role, role): launch for role, launch in kernels.launches.items()})


def backward_pass(
    request: Request, work: WorkList, specs: Mapping[str, KernelSpec], dq_order: DqSemaphoreOrder | None = None
) -> Pass:
    """Return a backward pass, with its workspaces and the gradient of a sink.

    Parameters
    ----------
    specs : dict of KernelSpec by role
        "backward_statistics" and "backward"; then "backward_rows", which computes dQ, or "convert_dq", which rounds the
        sums of dQ, or neither if "backward" finishes dQ.
    dq_order : DqSemaphoreOrder, optional
        The order in which thread blocks of "backward" finish dQ of some heads.
    """
    problem, backward, statistics = request.problem, specs["backward"], specs["backward_statistics"]
    rows, columns = query_tiles(problem, work, backward.block_q), key_tiles(problem, work, backward.block_kv)
    if backward.cuts_sequences:
        assert isinstance(work, IntervalWork)
        rows, columns = work.num_sequence_tiles

    def launch(role: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> Launch:
        spec, tiles = specs[role], num_tiles(specs[role], problem, work)
        if spec.cuts_sequences:
            tiles = problem.num_kv_heads * columns if spec.entry.holds_keys else problem.num_heads * rows
        return launch_of(spec, request.device, tiles, reads, writes, names)

    *leading, seqlen_q = problem.lse_shape()
    words = statistics.entry.query_record_words
    of_queries, features = {"delta": Workspace((*leading, seqlen_q), problem.accumulator)}, tuple[Feature, ...]()
    if words is not None:
        of_queries = {"query_stats": Workspace((*leading, rows * words(backward)), problem.accumulator)}
        features = (Feature("query_state", QUERY_STATE, tables=("dq_semaphores",)),)
    names, counted = tuple(feature.name for feature in features), tile_counters(backward)
    if dq_order is not None:
        counted["dq_semaphores"] = Workspace((problem.num_batch_heads, _COUNTS), np.dtype(np.int32))
    workspaces = {**of_queries, **counted}
    sums = ("dq_sum",) * ("backward_rows" not in specs)
    if sums:
        workspaces["dq_sum"] = Workspace((*leading, rows, backward.block_q * backward.head_dim), problem.accumulator)
    inputs = (*BACKWARD_INPUTS, *of_queries, *counted)
    cleared = (*of_queries, *sums, *counted, *("dq",) * statistics.finishes_dq)
    written = (*sums, "dk", "dv", *counted, *("dq",) * backward.finishes_dq)
    launches = {
        "backward_statistics": launch("backward_statistics", STATISTICS_INPUTS, cleared),
        "backward": launch("backward", (*inputs, *sums), written),
    }
    if "backward_rows" in specs:
        launches["backward_rows"] = launch("backward_rows", inputs, ("dq", *counted))
    if "convert_dq" in specs:
        convert = launch("convert_dq", ("dq_sum",), ("dq",))
        if dq_order is not None:
            skipped = partial(_num_fused_tiles, dq_order, problem.num_kv_heads, problem.group_size * rows)
            convert = replace(convert, skipped_tiles=skipped)
        launches["convert_dq"] = convert
    like = None if words is None else statistics
    return sink_backward(Pass(launches, workspaces, features), problem, like, tuple(of_queries), names)


def _num_fused_tiles(dq_order: DqSemaphoreOrder, num_kv_heads: int, tiles: int, num_batch: int) -> int:
    """Return how many query tiles the backward kernel finishes dQ of; each key/value head has `tiles` query tiles."""
    return tiles * dq_order.num_fused_heads(num_batch * num_kv_heads)
