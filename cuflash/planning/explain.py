"""The text of a kernel plan, with one line per decision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..blocks._chosen_work import ChosenWork
from ..blocks.work_list import ListedWork, WorkList
from ..dropout import LEVELS, Draws
from ..masks.base import Band
from ..scores.program import Program, curvature, depends
from .chosen_lists import UnionWork
from .families.fa1 import traffic
from .launches import Launch
from .plan import KernelPlan
from .captured_sums import OWN, kinds_of_sums
from .score_launches import captured_wrt


def explain(plan: KernelPlan, notes: Mapping[str, str], numbers: Sequence[int] = ()) -> str:
    """Describe a plan's decisions and their reasons.

    Parameters
    ----------
    plan : KernelPlan
    notes : dict of str by entry
        Notes about compiled kernels, such as their registers; other kernels are described as not compiled yet.
    numbers : sequence of int
        The seed and the offset of the plan's dropout, if it has one.
    """
    problem, device, kernels = plan.problem, plan.device, plan.kernels
    heads = f"{problem.num_heads} heads"
    if problem.num_heads != problem.num_kv_heads:
        heads += f" in groups of {problem.group_size} on {problem.num_kv_heads} key/value heads"
    dtype = f"{problem.dtype}" + f" at precision {problem.precision}" * (problem.precision != "ieee")
    where = f"{device.num_processors} cores"
    if device.compute_capability is not None:
        major, minor = device.compute_capability
        where = f"sm_{major}{minor}, {device.num_processors} multiprocessors"
    lines = [
        f"problem    batch {problem.batch}, {heads}, {problem.seqlen_q} queries, {problem.seqlen_kv} keys, "
        f"dims {problem.head_dim} and {problem.value_dim}, {dtype}, scale {problem.softmax_scale:.6g}",
        f"device     {device.name}: {where}, {device.tile_memory_bytes >> 10} KiB for a tile",
    ]
    if problem.score is not None:
        lines.append(f"score      {_described_score(problem.score)}")
    if problem.dropout is not None:
        lines.append(f"dropout    {_described_dropout(problem.dropout, *numbers)}")
    if problem.tangents:
        lines.append(f"tangents   of {', '.join(problem.tangents)}: the passes jvp and backward_jvp")
    if plan.tiling is not None:
        lines.append(f"tile       {min(plan.tiling.block_q, plan.work.block_q)} queries x {plan.tiling.block_kv} keys")
    if kernels is not None:
        lines += _described_kernels(plan, notes)
    return "\n".join([
        *lines,
        f"work       {_described_work(plan.work)}",
        f"FLOPs      {plan.forward_flops} forward",
        f"workspace  {plan.workspace_bytes} bytes, {plan.list_bytes} of them the work list",
    ])  # fmt: skip


def _described_score(program: Program) -> str:
    text = f"{len(program.instructions)} operations, {curvature(program)}"
    if program.arrays:
        text += f", arrays {', '.join(array.name for array in program.arrays)}"
    if "s" not in depends(program)[program.results[0]]:
        text += "; it does not read the score"
    if any(each.op == "const" and each.value == -math.inf for each in program.instructions):
        text += "; -inf hides keys but, unlike a mask, skips no work"
    return text


def _described_dropout(draws: Draws, seed: int, offset: int) -> str:
    source = "a seed from an array" if draws.reads_seed else f"seed {seed}"
    return f"p {draws.threshold / LEVELS:.6g}, {source}, offset {offset}"


def _described_kernels(plan: KernelPlan, notes: Mapping[str, str]) -> list[str]:
    kernels = plan.kernels
    assert kernels is not None
    launches = {role: launch for each in plan.passes.values() for role, launch in each.launches.items()}
    num_batch = plan.problem.mask_shape.num_batch
    lines = [
        _described_launch(launch, num_batch, notes.get(entry, "not compiled yet"))
        for entry, launch in launches.items()
    ]
    if "combine" in launches or kernels.num_splits > 1:
        packed = ", which holds a group's heads" if launches["forward"].spec.pack_gqa else ""
        lines.append(f"splits     {kernels.num_splits} blocks share the keys of a tile{packed}")
    if "scores" in kernels.forward.workspaces:
        lines.append("scores     all are computed and stored, whatever the mask, and so are their gradients")
    if "running_o" in kernels.forward.workspaces:
        forward, backward = traffic(plan.problem, kernels, plan.visited_scores)
        loop = "it grows as length^2 dim^2 / shared memory of a thread block"
        lines.append(f"traffic    {forward} bytes of device memory forward, {backward} backward: {loop}")
    if kernels.is_repeatable:
        lines.append("gradients  all results are bitwise reproducible")
    elif set(kinds_of_sums(plan.problem, captured_wrt(plan.problem))) - {OWN}:
        lines.append("gradients  some by atomic additions: their bits may differ from call to call, for speed")
    else:
        lines.append("gradients  dq by atomic additions: its bits may differ from call to call, for speed")
    return lines


def _described_launch(launch: Launch, num_batch: int, note: str) -> str:
    spec = launch.spec
    tile = f"{spec.block_q} queries x {spec.block_kv} keys" + " on tensor cores" * (spec.mma_rows > 0)
    memory = f"{launch.shared_bytes} bytes of shared memory"
    return f"kernel     {spec.name}: {tile}, grid {launch.grid(num_batch)}, {memory}, {note}"


def _described_work(work: WorkList) -> str:
    if isinstance(work, ListedWork):
        index = work.index._on_host
        full, partial = int((index.kinds == 1).sum()), int((index.kinds != 1).sum())
        text = f"listed: {full} full and {partial} partial blocks of {index.block}, {len(index.bits)} bit tiles"
        is_chosen = isinstance(work, ChosenWork)
        return f"{text}; {work.block_q} neighbouring queries visit the union of their blocks" if is_chosen else text
    if isinstance(work, UnionWork):
        tiling = work.tiling
        text = f"up to {tiling.num_chosen} blocks of {tiling.block} keys for each query"
        heads = f", with {tiling.heads_per_tile} heads each," if tiling.heads_per_tile > 1 else ""
        return f"{text}; {tiling.queries_per_tile} neighbouring queries{heads} visit the union of their blocks"
    if work.band is not None:
        return f"computed on the fly: query i attends {_described_band(work.band)}; no block list is stored"
    return "computed on the fly: each query attends one interval of keys; no block list is stored"


def _described_band(band: Band) -> str:
    lower = "" if band.lower is None else f"{_place(band.lower)} <= "
    upper = "" if band.upper is None else f" <= {_place(band.upper)}"
    return f"key j if {lower}j{upper}" if lower or upper else "every key"


def _place(offset: int) -> str:
    return f"i {'-' if offset < 0 else '+'} {abs(offset)}" if offset else "i"
