"""The least time that a plan's kernels can take, and the resource that sets it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ..api import plan as planned
from ..arrays import ShapeDtype, as_dtype, describe, is_number
from ..blocks.work_list import ListedWork
from ..errors import UnsupportedProblem
from ..keywords import explains_keywords
from ..planning.device import DeviceSpec
from ..planning.launches import Launch, Pass
from ..planning.options import Causality
from ..planning.peaks import Peaks
from ..planning.plan import KernelPlan
from ..planning.routing import FAMILIES
from ..plans import Plan
from ..scores._primitives import PRIMITIVES
from ..scores.program import Program, depends

_PASSES = ("forward", "backward")


@dataclass(frozen=True)
class KernelRoofline:
    """Work of one kernel, and how long each resource needs for it.

    Attributes
    ----------
    name : str
        The kernel.
    flops : int
        Multiplications and additions of its products over the elements that the mask allows.
    exponentials : int
        Powers of two and other special functions of those elements.
    score_operations : int
        Other operations of the score function.
    hbm_bytes : int
        Bytes of all arrays that the kernel reads and writes, each once.
    l2_bytes : int
        Bytes of the rows that all tiles copy, each as often as a tile does.
    seconds : dict of float by resource
        "products", "exponentials", "multiply-adds", "memory" and "level-2 cache".

    Examples
    --------
    >>> kernel = KernelRoofline("simt_forward", 8, 1, 0, 100, 200, {"products": 2e-6, "memory": 1e-6})
    >>> kernel.bound_by, kernel.least_seconds
    ('products', 2e-06)
    """

    name: str
    flops: int
    exponentials: int
    score_operations: int
    hbm_bytes: int
    l2_bytes: int
    seconds: dict[str, float]

    @property
    def bound_by(self) -> str:
        """The resource that needs longest.

        Examples
        --------
        >>> KernelRoofline("k", 0, 0, 0, 8, 8, {"memory": 2.0, "products": 1.0}).bound_by
        'memory'
        """
        return max(self.seconds, key=lambda resource: self.seconds[resource])

    @property
    def least_seconds(self) -> float:
        """The time that this resource needs, if it never waits.

        Examples
        --------
        >>> KernelRoofline("k", 0, 0, 0, 8, 8, {"memory": 2.0, "products": 1.0}).least_seconds
        2.0
        """
        return self.seconds[self.bound_by]


@explains_keywords
@dataclass(frozen=True)
class Roofline:
    """The kernels of a pass with their bounds; what `cuflash.study.roofline` returns.

    Parameters
    ----------
    device : str
        The GPU's name.
    kernels : tuple of KernelRoofline
        In the order of their launches.
    measured_seconds : float, optional
        The time that the pass took.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> shape = cuflash.ShapeDtype((32, 8192, 128), np.float16)
    >>> ready = cuflash.plan(shape, shape, shape, causal=True, device=cuflash.DeviceSpec.gpu("H100"))
    >>> roofline = cuflash.study.roofline(ready)
    >>> roofline.bound_by, round(roofline.measured(1e-3).share, 2)
    ('products', 0.51)
    """

    device: str
    kernels: tuple[KernelRoofline, ...]
    measured_seconds: float | None = None

    @property
    def least_seconds(self) -> float:
        """The sum of the kernels' bounds: the pass cannot take less.

        Examples
        --------
        >>> kernel = KernelRoofline("k", 0, 0, 0, 8, 8, {"memory": 2.0})
        >>> Roofline("H100", (kernel, kernel)).least_seconds
        4.0
        """
        return sum(kernel.least_seconds for kernel in self.kernels)

    @property
    def bound_by(self) -> str:
        """The resource that binds the kernel of the largest bound.

        Examples
        --------
        >>> kernel = KernelRoofline("k", 0, 0, 0, 8, 8, {"memory": 2.0})
        >>> Roofline("H100", (kernel,)).bound_by
        'memory'
        """
        return max(self.kernels, key=lambda kernel: kernel.least_seconds).bound_by if self.kernels else "nothing"

    def measured(self, seconds: float) -> Roofline:
        """Return the same with the time that the pass took, to compare.

        Parameters
        ----------
        seconds : float
            The time of all kernels of the pass.

        Returns
        -------
        Roofline
            With a `share`.

        Raises
        ------
        UnsupportedProblem
            It is not a positive number.

        Examples
        --------
        >>> kernel = KernelRoofline("k", 0, 0, 0, 8, 8, {"memory": 2.0})
        >>> Roofline("H100", (kernel,)).measured(4.0).share
        0.5
        """
        if not is_number(seconds) or not 0 < seconds < np.inf:
            raise UnsupportedProblem([f"seconds must be a positive number; got {describe(seconds)}"])
        return replace(self, measured_seconds=float(seconds))

    @property
    def share(self) -> float:
        """The bound over the time measured: 1 is the best that can be, and more shows that a rate is wrong.

        Examples
        --------
        >>> Roofline("H100", ()).measured(1.0).share
        0.0
        """
        if self.measured_seconds is None:
            raise UnsupportedProblem(["measured_seconds must be known for a share; got None: call .measured(seconds)"])
        return self.least_seconds / self.measured_seconds

    def __str__(self) -> str:
        lines = [_described(kernel) for kernel in self.kernels]
        lines.append(f"{'at least':<26}{self.least_seconds * 1e3:>10.4f} ms  on {self.device}")
        if self.measured_seconds is not None:
            measured = f"{self.measured_seconds * 1e3:>10.4f} ms"
            lines.append(f"{'measured':<26}{measured}  {self.share:.1%} of it is the bound")
        return "\n".join(lines)


@explains_keywords
def roofline(plan: Plan | KernelPlan, *, which: str = "forward", peaks: Peaks | None = None) -> Roofline:
    """Bound the time of a planned pass from below by what its kernels must compute and move.

    Parameters
    ----------
    plan : Plan or KernelPlan
        What `cuflash.plan` returns for a GPU; ShapeDtype and `device=` make one without arrays and without a GPU.
    which : {"forward", "backward"}
        The pass.
    peaks : Peaks, optional
        Rates of the GPU; those of known GPUs unless given.

    Returns
    -------
    Roofline
        A record that prints itself.

    Raises
    ------
    TypeError
        It is no plan.
    UnsupportedProblem
        The plan is one of the host; the pass or the GPU's rates are not known.

    Notes
    -----
    Products are 2 (head_dim + value_dim) operations a kept element forward, and 2 (3 head_dim + 2 value_dim) backward
    in one walk; elements that a mask hides inside of a visited block do not count. Arrays count once for each kernel
    that reads or writes them, so that a kernel which finds them in the level-2 cache can be faster than its memory's
    bound.
    The roofline model is that of Williams, Waterman and Patterson, Communications of the ACM 52 (4), 2009.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> shape = cuflash.ShapeDtype((32, 8192, 128), np.float16)
    >>> ready = cuflash.plan(shape, shape, shape, causal=True, device=cuflash.DeviceSpec.gpu("H100"))
    >>> print(cuflash.study.roofline(ready).measured(0.9e-3))
    sm90_forward                  0.5136 ms  by products: 549822 MFLOP, 1073 M exponentials, 269 MB, 3177 MB of L2
    at least                      0.5136 ms  on H100
    measured                      0.9000 ms  57.1% of it is the bound
    """
    kernel_plan = plan._plan if isinstance(plan, Plan) else plan
    if not isinstance(kernel_plan, KernelPlan):
        raise TypeError(f"plan must be what cuflash.plan returns; got {describe(plan)}")
    reasons = []
    if not isinstance(which, str) or which not in _PASSES:
        reasons.append(f"which must be 'forward' or 'backward'; got {describe(which)}")
    if peaks is not None and not isinstance(peaks, Peaks):
        reasons.append(f"peaks must be a Peaks or None; got {describe(peaks)}")
    if kernel_plan.kernels is None:
        reasons.append("plan must be one for a GPU; got one of the host: give device=cuflash.DeviceSpec.gpu('H100')")
    if reasons or kernel_plan.kernels is None:
        raise UnsupportedProblem(reasons)
    rates = Peaks.of(kernel_plan.device) if peaks is None else peaks
    device = kernel_plan.device
    if kernel_plan.is_empty:
        return Roofline(device.name, ())
    kernels = kernel_plan.kernels.forward if which == "forward" else kernel_plan.kernels.backward
    kept, visited = _elements(kernel_plan)
    sizes = _array_bytes(kernel_plan, kernels)
    return Roofline(
        device.name,
        tuple(_bounded(kernel_plan, launch, rates, kept, visited, sizes) for launch in kernels.launches.values()),
    )


def _bounded(
    plan: KernelPlan, launch: Launch, peaks: Peaks, kept: int, visited: int, sizes: dict[str, int]
) -> KernelRoofline:
    """Return the work and the times of one kernel."""
    problem, spec = plan.problem, launch.spec
    of_head, of_value = spec.entry.products
    flops = 2 * kept * (of_head * problem.head_dim + of_value * problem.value_dim)
    special, others = (0, 0) if spec.score is None else _operations(spec.score)
    exponentials = kept * (special + spec.entry.has_exponentials)
    operations = kept * others
    hbm = sum(sizes[name] for name in dict.fromkeys((*launch.reads, *launch.writes)) if name != "dlse")
    row = (problem.head_dim * (of_head > 0) + problem.value_dim * (of_value > 0)) * problem.dtype.itemsize
    height = spec.block_kv if spec.entry.holds_keys else spec.block_q
    shared = problem.group_size if spec.pack_gqa else 1
    l2 = hbm + visited * row // (height * shared)
    cycles = peaks.clock * plan.device.num_processors
    is_wide = problem.dtype == np.float64
    seconds = {
        "products": _over(flops, _product_rate(plan, launch, peaks) * cycles),
        "exponentials": 0.0 if is_wide else _over(exponentials, peaks.exponentials * cycles),
        "multiply-adds": _over(operations, (peaks.flops_64 if is_wide else peaks.flops_32) * cycles),
        "memory": hbm / peaks.hbm_bytes,
        "level-2 cache": _over(l2, peaks.l2_bytes * cycles),
    }
    return KernelRoofline(spec.name, flops, exponentials, operations, hbm, l2, seconds)


def _over(amount: int, rate: float) -> float:
    """Seconds; infinite for work that a chip has no unit for."""
    return amount / rate if rate else np.inf if amount else 0.0


def _product_rate(plan: KernelPlan, launch: Launch, peaks: Peaks) -> float:
    """FLOPs a cycle and multiprocessor of the units that make a kernel's products."""
    spec, dtype = launch.spec, plan.problem.dtype
    if spec.precision != "ieee":
        return peaks.tensor_tf32 / (3 if spec.precision == "tf32x3" else 1)
    if dtype == np.float64:
        return peaks.tensor_64 if spec.mma_rows else peaks.flops_64
    # Tensor cores multiply 16-bit elements, so that their kernels round weights to 16 bits first.
    return peaks.tensor_16 if FAMILIES[spec.family].rounds_weights else peaks.flops_32


def _operations(program: Program) -> tuple[int, int]:
    """Special functions and other operations that a program computes anew for each score."""
    per_score = [
        instruction.op
        for instruction, on in zip(program.instructions, depends(program))
        if ("s" in on or {"i", "j"} <= on) and instruction.args
    ]
    special = sum(op in PRIMITIVES and PRIMITIVES[op].is_special for op in per_score)
    return special, len(per_score) - special


def _elements(plan: KernelPlan) -> tuple[int, int]:
    """Elements that the mask allows, and those that the work list visits, over all batch entries and heads."""
    work, shape = plan.work.on_host, plan.problem.mask_shape
    counts: dict[tuple[int, int], tuple[int, int]] = {}
    kept = visited = 0
    of_lists = work.index.row_counts().sum(axis=-1) if isinstance(work, ListedWork) else None
    for b, h in np.ndindex(shape.num_batch, shape.num_heads):
        owner = work.owner(b, h)
        if owner not in counts:
            runs = 0
            for start in range(0, shape.seqlen_q, work.block_q):
                stop = min(start + work.block_q, shape.seqlen_q)
                segments = work.row(*owner, start, stop)
                runs += (stop - start) * sum(segment.num_rows for segment in segments)
            if of_lists is not None:
                counts[owner] = int(of_lists[owner]), runs
            else:
                lo, hi = work.bounds(*owner, 0, shape.seqlen_q)
                counts[owner] = int(np.maximum(hi.astype(np.int64) - lo, 0).sum()), runs
        kept, visited = kept + counts[owner][0], visited + counts[owner][1]
    return kept, visited


def _array_bytes(plan: KernelPlan, kernels: Pass) -> dict[str, int]:
    """Bytes of each array of a pass by name."""
    problem = plan.problem
    itemsize = problem.dtype.itemsize
    sizes = {name: prod(shape) * itemsize for name, shape in problem.argument_shapes().items()}
    sizes["o"] = sizes["do"] = prod(problem.o_shape()) * itemsize
    sizes["lse"] = prod(problem.lse_shape()) * problem.accumulator.itemsize
    sizes |= {name: prod(made.shape) * made.dtype.itemsize for name, made in plan.gradients_made.items()}
    sizes |= {operand.key: prod(operand.shape) * operand.dtype.itemsize for operand in problem.operands}
    return sizes | {name: workspace.nbytes for name, workspace in kernels.workspaces.items()}


def _described(kernel: KernelRoofline) -> str:
    told = f"{kernel.flops // 10**6} MFLOP, {kernel.exponentials // 10**6} M exponentials"
    told += f", {kernel.hbm_bytes // 10**6} MB, {kernel.l2_bytes // 10**6} MB of L2"
    return f"{kernel.name:<26}{kernel.least_seconds * 1e3:>10.4f} ms  by {kernel.bound_by}: {told}"


_COUNTS = ("heads", "length", "kv-heads", "kv-length", "batch", "head-dim")


def roofline_report(arguments: Sequence[str]) -> str:
    """Print what ``python -m cuflash roofline`` prints.

    Examples
    --------
    >>> print(roofline_report("--heads 32 --length 65536 --device H100 --causal --measured 40".split()))
    sm90_forward                 32.8668 ms  by products: 35184908 MFLOP, 68720 M exponentials, 2155 MB, 185765 MB of L2
    at least                     32.8668 ms  on H100
    measured                     40.0000 ms  82.2% of it is the bound
    """
    parser = argparse.ArgumentParser("python -m cuflash roofline", description="the least time of a pass on a GPU")
    for name, meaning in (("heads", "query heads"), ("length", "queries, and keys unless --kv-length is given")):
        parser.add_argument(f"--{name}", type=int, required=True, help=meaning)
    parser.add_argument("--kv-heads", type=int, help="key/value heads")
    parser.add_argument("--kv-length", type=int, help="keys")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="H100", type=_device_of_word, help="a GPU by its name")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--causal", action="store_true", help="the last query meets the last key")
    parser.add_argument("--backward", action="store_true", help="the backward pass")
    parser.add_argument("--measured", type=float, help="milliseconds that the pass took")
    given = parser.parse_args(arguments)
    counts = {name: getattr(given, name.replace("-", "_")) for name in _COUNTS}
    low = {name: count for name, count in counts.items() if count is not None and count < 1}
    reasons = [f"--{name} must be at least 1; got {count}" for name, count in low.items()]
    if given.measured is not None and not 0 < given.measured < np.inf:
        reasons.append(f"--measured must be a positive number; got {given.measured:g}")
    if reasons:
        parser.error("; ".join(reasons))
    try:
        return _report(given)
    except UnsupportedProblem as error:
        parser.error("; ".join(error.reasons))


def _device_of_word(word: str) -> DeviceSpec:
    try:
        return DeviceSpec.gpu(word)
    except UnsupportedProblem as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _report(given: Any) -> str:
    dtype = as_dtype("--dtype", given.dtype)
    kv_heads = given.heads if given.kv_heads is None else given.kv_heads
    kv_length = given.length if given.kv_length is None else given.kv_length
    q = ShapeDtype((given.batch, given.heads, given.length, given.head_dim), dtype)
    kv = ShapeDtype((given.batch, kv_heads, kv_length, given.head_dim), dtype)
    causal: Causality = "bottom_right" if given.causal else False
    ready = planned(q, kv, kv, causal=causal, kernel=given.kernel, device=given.device)
    made = roofline(ready, which="backward" if given.backward else "forward")
    return str(made if given.measured is None else made.measured(given.measured / 1e3))
