"""A pass of a plan bound to the layouts of arrays; every call of the library runs one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, ModuleType

from ..arrays import Array, ShapeDtype, namespace, summed_to, times_power_of_two
from ..layouts import reach
from ..planning.options import DOT
from ..planning.plan import KernelPlan
from . import checks, cpu, gpu, host_tangents, sim, without_keys
from ._host_tiles import KeptTiles
from .launch import BoundCall, PassLayout

EXECUTORS: dict[str, ModuleType] = {"cpu": cpu, "gpu": gpu, "sim": sim}

_OF_EARLIER = ("o", "lse", f"o{DOT}", f"lse{DOT}")  # results of an earlier pass that this pass may read
_SCALED = "for a scale so far from 1, q and k are copied to memory that a graph would outlive"
_SUMMED = "gradients over broadcast axes are summed in memory that a graph would outlive"


class BoundPlan:
    """A pass of a plan, bound to arrays of one layout.

    Parameters
    ----------
    plan : KernelPlan
    executor : str
        "cpu", "gpu" or "sim".
    name : str
        The pass.
    arrays, outs : dict of arrays by name
        Inputs of the pass, and the results that the caller allocates. Objects with only a layout suffice on a GPU.
    wants_lse, pins, axes, machine
        As in `Plan._bind`.

    Attributes
    ----------
    plain_call : callable (*arrays, *outs, numbers), optional
        Launches the pass and returns its new results; None if copies, sums or checks surround the launches.
    """

    def __init__(
        self,
        plan: KernelPlan,
        executor: str,
        name: str,
        arrays: Mapping[str, Array],
        outs: Mapping[str, Array] = MappingProxyType({}),
        wants_lse: bool = True,
        pins: bool = False,
        axes: Mapping[str, Sequence[int]] = MappingProxyType({}),
        machine: gpu.Gpu | None = None,
    ) -> None:
        problem, wanted, results = plan.problem, plan.results(name), plan.kernel_results(name)
        new = {result: each for result, each in results.items() if result not in outs}
        unwanted = {"lse": new.pop("lse")} if name == "forward" and not wants_lse and "lse" in new else {}
        self._names, self._results = tuple(arrays), tuple(each for each in results if each not in unwanted)
        self._is_checked, self._name = checks.is_on(), name
        self._machine = (machine or gpu.current_target()) if executor == "gpu" else None
        of_scale = ("q", "k") if problem.rows_per_scale is None else ("q_scale", "k_scale")
        self._exponents: dict[str, int] = {}
        for each, exponent in zip(of_scale, problem.scaling[1:]):
            if exponent:
                self._exponents[each] = self._exponents[each + DOT] = exponent
        self._sums = {} if wanted == results else wanted
        self._copies = _SCALED if self._exponents else _SUMMED if self._sums else ""
        read = {each: self._scaled(each, array) for each, array in arrays.items()}
        layout = PassLayout(name, {**problem.keyed(read), **outs}, new, unwanted, axes, pins)
        executors = {**EXECUTORS, "cpu": host_tangents} if name.endswith("jvp") else EXECUTORS
        executes = without_keys if plan.is_empty else executors[executor]
        bind: Callable[..., BoundCall] = executes.bind if machine is None else partial(gpu.bind, machine=machine)
        self._call: Callable[..., Sequence[Array]] = bind(plan, layout)
        is_plain = not (self._exponents or self._sums or self._is_checked)
        self.plain_call: Callable[..., Sequence[Array]] | None = self._call if is_plain else None
        self._spans = [reach(array) for array in (*arrays.values(), *outs.values())] if outs and self._machine else []

    def run(
        self, arrays: Mapping[str, Array], outs: Mapping[str, Array] = MappingProxyType({}),
        numbers: Sequence[int] = (), tiles: KeptTiles | None = None,
    ) -> Sequence[Array]:  # fmt: skip
        """Run the pass on arrays of the bound layouts, and return its results in the order of the plan's results.

        Without `wants_lse` the lse is left out. `numbers` are the seed and offset of dropout. On the host, `tiles` may
        be those of a plan for different numbers of rows, which the arrays and `outs` must have.
        """
        own = {} if tiles is None else {"tiles": tiles}
        if self.plain_call is not None:
            results = self.plain_call(*arrays.values(), *outs.values(), numbers=numbers, **own)
            return self._with_outs(results, outs) if outs else results
        if self._machine is not None and self._copies:
            self._machine.refuse_copies(self._copies)
        read = [self._scaled(name, array) for name, array in arrays.items()]
        check = None
        if self._is_checked:
            inputs = {name: array for name, array in zip(self._names, read) if name not in _OF_EARLIER}
            check = checks.Check(namespace(read[0]), inputs)
        results = self._with_outs(self._call(*read, *outs.values(), numbers=numbers, check=check, **own), outs)
        return list(map(self._finished, self._results, results))

    def _with_outs(self, results: Sequence[Array], outs: Mapping[str, Array]) -> Sequence[Array]:
        """Return all results in the plan's order, including those in memory that the caller allocated."""
        new = iter(results)
        return [outs[name] if name in outs else next(new) for name in self._results]

    def may_overlap(self, arrays: Mapping[str, Array], outs: Mapping[str, Array]) -> bool:
        """True if `outs` may overlap another array in memory; on the host, always True, without a comparison.

        All memory between an array's first and last element counts as the array's.
        """
        if self._machine is None:
            return True
        starts = [self._machine.address(array) for array in (*arrays.values(), *outs.values())]
        ends = [start + high for start, (_, high) in zip(starts, self._spans)]
        starts = [start + low for start, (low, _) in zip(starts, self._spans)]
        first_out = len(self._names)
        return any(
            starts[out] < ends[other] and starts[other] < ends[out]
            for out in range(first_out, len(starts))
            for other in range(out)
        )

    def _scaled(self, name: str, array: Array) -> Array:
        """Return q or k times the power of two from `Problem.scaling`; return other arrays unchanged."""
        return times_power_of_two(array, self._exponents[name]) if name in self._exponents else array

    def _finished(self, name: str, result: Array) -> Array:
        """Return a gradient multiplied by its power of two, and summed over broadcast axes."""
        if self._name.startswith("backward") and name[1:] in self._exponents:
            result = times_power_of_two(result, self._exponents[name[1:]])
        if not self._sums:
            return result
        wanted: ShapeDtype = self._sums[name]
        sum_to: Callable[..., Array] = summed_to if self._machine is None else self._machine.sum_to
        return sum_to(result, wanted.shape, wanted.dtype)
