"""Kernel plans: all decisions about a call that do not need its data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from ..arrays import ShapeDtype
from ..blocks._chosen_work import chosen_work
from ..blocks.index_mask import IndexMask
from ..blocks.work_list import IntervalWork, WorkList, work_list
from ..errors import refuse
from ..masks._chosen import chosen_masks
from ..masks.base import Band, Mask
from ..masks.content import Memoized, held_masks
from .chosen_lists import NOT_JOINED, UnionsAtCall, UnionWork
from .device import DeviceSpec
from .dropout_launches import dropout_places, with_dropout
from .families._passes import backward_jvp_pass, jvp_pass
from .families.family import Family, Request
from .few_queries import with_few_queries
from .host import HostTiling, host_tile, in_flat_tiles
from .launches import Kernels, Pass
from .list_kernels import work_of_kernels
from .options import DOT
from .problem import Problem
from .routing import named, rerouted, routed, unions
from .score_launches import captured_wrt, stored_gradient, with_score
from .spec import KernelSpec
from .tangent_launches import with_tangents
from .tangents import arrays_with_tangents

_OF_ARGUMENTS = ("dq", "dk", "dv")
_AXES_OF_A_LAUNCH = 2  # number of batch axes that one launch always covers, even with tensor maps
MAX_TILES = 1 << 30  # maximum tiles of a launch: kernels add the number of thread blocks to tile numbers, in int32


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelPlan(Memoized):
    """The problem, mask, device, work list and kernels of a call, all frozen.

    Attributes
    ----------
    problem : Problem
    mask : Mask
        The mask, resolved for the problem's shape.
    device : DeviceSpec
    work : WorkList
    family : Family, optional
        The family of the kernels; None on the host.
    rule : str
        The rule that chose the family, as `explain` prints it.
    kernels : Kernels, optional
        The launches; None on the host.
    tiling : HostTiling, optional
        The tiles of the cpu executor; None on a GPU.
    """

    problem: Problem
    mask: Mask
    device: DeviceSpec
    work: WorkList
    family: Family | None = None
    rule: str = ""
    kernels: Kernels | None = None
    tiling: HostTiling | None = None

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute: no queries, no keys, or an empty batch."""
        return 0 in (self.problem.num_batch_heads, self.problem.seqlen_q, self.problem.seqlen_kv)

    @property
    def is_kernels_alone(self) -> bool:
        """True if kernels alone execute a call: it is not empty, and q and k are not scaled before the first kernel."""
        return not self.is_empty and not any(self.problem.scaling[1:])

    @property
    def product_dtype(self) -> np.dtype[np.generic]:
        """The dtype that P and dS are rounded to before they are multiplied with v, do, k and q."""
        is_rounded = self.family is not None and self.family.rounds_weights and self.problem.dtype.itemsize == 2
        return self.problem.dtype if is_rounded else self.problem.accumulator

    @property
    def passes(self) -> Mapping[str, Pass]:
        """The launches of each pass by its name; empty on the host."""
        return {} if self.kernels is None else {**self.kernels.passes, **self._tangent_passes}

    def pass_of(self, name: str, arrays: Collection[str]) -> Pass:
        """Return the launches of a pass that reads the arrays with these names, as executors name them.

        Raises
        ------
        UnsupportedProblem
            The plan's family has no kernels for the pass.
        """
        problem = self.problem
        if name in (own := self.passes) and not name.endswith("jvp"):
            return own[name]
        keys = problem.keyed({f"{each}{DOT}": each for each in arrays_with_tangents(problem)})
        tangents = tuple(each for key, each in keys.items() if key in arrays)
        is_planned = tangents == problem.tangents and name in self._tangent_passes
        return self._tangent_passes[name] if is_planned else self._tangent_pass(name, tangents)

    @cached_property
    def _tangent_passes(self) -> Mapping[str, Pass]:
        """The passes that differentiate along the tangents that the problem names, by the name of the pass."""
        tangents = self.problem.tangents
        names = tuple(name for name in tangents if name not in ("do", "dlse"))
        own = {"jvp": self._tangent_pass("jvp", names)} if names else {}
        if tangents and not _captured_gradient_reasons(self.problem):
            own["backward_jvp"] = self._tangent_pass("backward_jvp", tangents)
        return own

    def _tangent_pass(self, name: str, tangents: tuple[str, ...]) -> Pass:
        """Return the launches of a pass that differentiates along the tangents of the arrays with these names."""
        assert self.family is not None
        problem = replace(self.problem, tangents=tangents)
        reasons = self.family.tangent_reasons(problem)
        if isinstance(self.work, UnionWork):
            rule = "tangents must be planned for a mask that chooses blocks for each query"
            fix = f"write plan(tangents={tangents}), or call attention_jvp or attention_hvp"
            reasons.append(f"{rule}; the plan has none: {fix}")
        if name == "backward_jvp":
            reasons += _captured_gradient_reasons(problem)
        refuse(reasons)
        request = Request.over(problem, self.device, self.work)
        if name == "jvp":
            return with_tangents(jvp_pass(request, self.work, self.family.jvp_spec(request)), problem)
        specs = self.family.backward_jvp_specs(request)
        return with_tangents(backward_jvp_pass(request, self.work, *specs), problem)

    @cached_property
    def specs(self) -> dict[str, KernelSpec]:
        """The specifications of all kernels by entry, in the order of their launches; empty on the host."""
        return {entry: spec for each in self.passes.values() for entry, spec in each.specs.items()}

    @property
    def list_bytes(self) -> int:
        """Bytes of the work list on the device that reads it."""
        if isinstance(self.work, UnionsAtCall):
            return self.work.nbytes + self.work.source.nbytes
        if self.kernels is None or isinstance(self.work, IntervalWork):
            return self.work.nbytes
        index = self.work.index
        matrices = index.batch * index.num_heads
        rows, columns, entries = matrices * index.num_q_blocks, matrices * index.num_kv_blocks, len(index.indices)
        sides = sum(int(side.nbytes) for side in (index.lo, index.hi) if side is not None)
        return 4 * (2 * (rows + columns + 1) + 5 * entries) + entries + int(index.bits.nbytes) + sides

    @property
    def workspace_bytes(self) -> int:
        """Bytes of memory in addition to inputs and results, for the pass that needs the most.

        On a GPU this includes the workspaces between kernels, gradients before they are summed over broadcast axes,
        these sums before they are rounded, and the arrays of the work list. Tiles in shared memory do not count. For
        the host, see `HostTiling.workspace_bytes`.
        """
        if self.kernels is None:
            assert self.tiling is not None
            return self.tiling.workspace_bytes
        summed = dict.fromkeys(("backward", "backward_jvp"), self._summed_bytes)
        return max(each.nbytes + summed.get(name, 0) for name, each in self.passes.items()) + self.list_bytes

    def results(self, name: str) -> dict[str, ShapeDtype]:
        """Return the shapes and dtypes of the results that a pass returns to the caller, by name."""
        return self._results_of_rows[name] if name in ("forward", "jvp") else self.gradients

    def kernel_results(self, name: str) -> dict[str, ShapeDtype]:
        """Return the shapes and dtypes of the results of a pass as the executor writes them, by name."""
        return self._results_of_rows[name] if name in ("forward", "jvp") else self.kernel_gradients

    @cached_property
    def _results_of_rows(self) -> dict[str, dict[str, ShapeDtype]]:
        """o and lse, for the pass "forward", and their tangents, for the pass "jvp"."""
        problem = self.problem
        o, lse = ShapeDtype(problem.o_shape(), problem.dtype), ShapeDtype(problem.lse_shape(), problem.accumulator)
        return {name: {f"o{dot}": o, f"lse{dot}": lse} for name, dot in (("forward", ""), ("jvp", DOT))}

    @property
    def gradients(self) -> dict[str, ShapeDtype]:
        """Shapes and dtypes of the backward pass's results by name: dq, dk, dv, and gradients of operands in `wrt`.

        Their tangents, which are the results of the pass "backward_jvp", have the same names.
        """
        problem = self.problem
        dtype, of_keys = problem.dtype, problem.accumulator if problem.wide_gradients else problem.dtype
        arguments = {
            f"d{name}": ShapeDtype(shape, dtype if name == "q" else of_keys)
            for name, shape in problem.argument_shapes().items()
        }
        others = [operand for operand in problem.operands if operand.name in problem.wrt]
        return arguments | {f"d{operand.key}": ShapeDtype(operand.shape, operand.dtype) for operand in others}

    @property
    def kernel_gradients(self) -> dict[str, ShapeDtype]:
        """Shapes and dtypes of gradients as the executor writes them, before sums over broadcast axes.

        Gradients that are summed over broadcast axes afterwards have all batch axes, and the accumulator's dtype.
        Kernels sum the gradients of operands themselves, unless a batch may take more than one launch.
        """
        problem, wanted = self.problem, self.gradients
        full = {f"d{name}": shape for name, shape in problem.gradient_shapes().items()}
        full |= {f"d{each.key}": each.shape if each.is_captured else problem.heads_shape() for each in problem.operands}
        are_operands_summed = self.kernels is None or self.is_empty or len(problem.batch) > _AXES_OF_A_LAUNCH
        captured = {f"d{each.key}" for each in problem.operands if each.is_captured}
        if self.kernels is not None and (stored := stored_gradient(self.kernels.backward)) is not None:
            captured.remove(stored)
        is_summed = {
            name: name in captured or (are_operands_summed if name not in _OF_ARGUMENTS else each.shape != full[name])
            for name, each in wanted.items()
        }
        return {
            name: ShapeDtype(full[name], problem.accumulator) if is_summed[name] else each
            for name, each in wanted.items()
        }

    @property
    def _summed_bytes(self) -> int:
        """Bytes of gradients before sums over broadcast axes, and of the largest of these sums before rounding."""
        problem, wanted = self.problem, self.gradients
        summed = {name: each.shape for name, each in self.kernel_gradients.items() if each != wanted[name]}
        before = sum(map(prod, summed.values()))
        narrow = [prod(wanted[name].shape) for name in summed if wanted[name].dtype != problem.accumulator]
        return (before + max(narrow, default=0)) * problem.accumulator.itemsize

    def with_band(self, band: Band, seqlen_q: int, seqlen_kv: int) -> KernelPlan:
        """Return the host's plan for a different number of queries and keys under a band."""
        assert self.tiling is not None
        problem, block_q, block_kv = (
            replace(self.problem, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv), self.tiling.block_q, self.tiling.block_kv
        )  # fmt: skip
        work = in_flat_tiles(
            IntervalWork(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, block_q=block_q, block_kv=block_kv, band=band)
        )
        tiling = replace(self.tiling, problem=problem, work=work)
        return replace(self, problem=problem, mask=band, work=work, tiling=tiling)

    @property
    def forward_flops(self) -> int:
        """Multiplications and additions of the two matrix products, over the scores that the work list visits."""
        return 2 * self.visited_scores * (self.problem.head_dim + self.problem.value_dim)

    @property
    def visited_scores(self) -> int:
        """Number of scores that the work list visits, over all batch entries and heads."""
        total, work, shape = 0, self.work.on_host, self.problem.mask_shape
        for b in range(shape.num_batch):
            for h in range(shape.num_heads):
                for start in range(0, shape.seqlen_q, work.block_q):
                    stop = min(start + work.block_q, shape.seqlen_q)
                    keys = sum(visit.num_rows for visit in work.row(b, h, start, stop))
                    total += (stop - start) * keys
        return total


def _captured_gradient_reasons(problem: Problem) -> list[str]:
    """Return why kernels do not compute the tangents of the gradients of captured arrays."""
    return [
        f"wrt must not name {name!r} in second derivatives on a GPU, which have no kernel for gradients of a score "
        "function's arrays: leave it out, detach a tensor, or pass arrays of the host"
        for name in captured_wrt(problem)
    ]


def _has_lists_of_queries(mask: Mask) -> bool:
    """True if a part of a mask has a list of blocks for each query."""
    of_indices = (part.index.block[0] for part in held_masks(mask) if isinstance(part, IndexMask))
    return next(chosen_masks(mask), None) is not None or 1 in of_indices


def host_plan(problem: Problem, mask: Mask, device: DeviceSpec) -> KernelPlan:
    """Return the plan of a call on the host."""
    block_q, block_kv = host_tile(problem, device)
    shape = problem.mask_shape
    work = chosen_work(mask, shape) or in_flat_tiles(work_list(mask, shape, (block_q, block_kv)))
    tiling = HostTiling(problem, device, block_q, block_kv, work)
    return KernelPlan(problem=problem, mask=mask, device=device, work=work, tiling=tiling)


def gpu_plan(
    problem: Problem, mask: Mask, device: DeviceSpec, kernel: str = "auto", deterministic: bool = False
) -> KernelPlan:
    """Return the plan of a call on a GPU, or on the simulator.

    Parameters
    ----------
    kernel : str
        A family that serves the problem on the device, or "auto".
    deterministic : bool
        True if all results must be bitwise reproducible.

    Raises
    ------
    UnsupportedProblem
        No tile of the family fits in the device's shared memory, or there are more tiles than kernels can number.
    """
    family, why, work = _routed_work(problem, mask, device, kernel)
    kernels = family.launches(Request.over(problem, device, work, deterministic), work)
    if kernel == "auto":
        of_family, kernels = kernels, with_few_queries(kernels, problem, device, work)
        why += f"; few queries: {kernels.forward.launches['forward'].spec.name}" * (kernels is not of_family)
    reasons = _tile_reasons(kernels, problem.mask_shape.num_batch)
    if problem.score is not None:
        kernels = with_score(kernels, problem, deterministic=deterministic, is_whole=_is_band(work))
    if problem.dropout is not None:
        places = dropout_places(problem.places, problem.num_heads, problem.whole_shape)
        kernels = with_dropout(kernels, problem.dropout, places)
    refuse(reasons)
    rule = f"{family.name}, by kernel='auto': {why}" if kernel == "auto" else f"{family.name}, chosen by name"
    if not isinstance(work, UnionWork) and _has_lists_of_queries(mask):
        rule += NOT_JOINED
    plan = KernelPlan(
        problem=problem, mask=mask, device=device, work=work, family=family, rule=rule,
        kernels=kernels,
    )  # fmt: skip
    if problem.tangents:
        assert plan.passes  # raises an error if a kernel for tangents is missing or has no tile
    return plan


def _routed_work(problem: Problem, mask: Mask, device: DeviceSpec, kernel: str) -> tuple[Family, str, WorkList]:
    """Return the family that `kernel` selects, the reason, and the work list."""
    union = unions(problem, mask, device, kernel)
    if union is not None:
        family, joined = union
        return family, "neighbouring queries, each with its own blocks, walk the union of these", joined
    family, why = routed(problem, device) if kernel == "auto" else (named(kernel, problem), "")
    work = _work(problem, mask, device, family)
    other = rerouted(family, work) if kernel == "auto" else None
    if other is None:
        return family, why, work
    return *other, _work(problem, mask, device, other[0])


def _work(problem: Problem, mask: Mask, device: DeviceSpec, family: Family) -> WorkList:
    block = family.list_block(problem, device)
    work = work_of_kernels(mask, problem.mask_shape, block, is_ordered=family.takes_orders)
    return family.with_sequence_tiles(work)


def _is_band(work: WorkList) -> bool:
    """True if a band is the whole mask."""
    return isinstance(work, IntervalWork) and not isinstance(work, UnionWork) and work.band is not None


def _tile_reasons(kernels: Kernels, num_batch: int) -> list[str]:
    """Return why a problem has more tiles than kernels can number."""
    advice = "split the batch or the heads over several calls"
    limit = f"q, k and v must have at most {MAX_TILES} tiles for"
    launches = (launch for each in kernels.passes.values() for launch in each.launches.values())
    return [
        f"{limit} {launch.spec.name}; got {launch.tiles * num_batch}: {advice}"
        for launch in launches
        if launch.tiles * num_batch > MAX_TILES
    ]
