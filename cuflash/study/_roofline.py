"""Rooflines: lower bounds on the time of a plan's kernels, and the bottleneck of each."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

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
from ..plans.plan import Plan
from ..scores._primitives import PRIMITIVES
from ..scores.program import Program, depends

_PASSES = ("forward", "backward")


@dataclass(frozen=True)
class KernelRoofline:
    """The work of one kernel, and the time that each resource needs for it.

    Attributes
    ----------
    name : str
        The name of the kernel.
    flops : int
        Multiplications and additions of its matrix products, for the elements that the mask allows.
    exponentials : int
        Powers of two and other special functions of those elements.
    score_operations : int
        Other operations of the score function.
    hbm_bytes : int
        Bytes of all arrays that the kernel reads or writes, each array counted once.
    l2_bytes : int
        Bytes of the rows that tiles copy; a row counts once for each tile that copies it.
    seconds : dict of float by resource
        The times of "products", "exponentials", "multiply-adds", "memory" and "level-2 cache".

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
        """The bottleneck: the resource that needs the most time.

        Examples
        --------
        >>> KernelRoofline("k", 0, 0, 0, 8, 8, {"memory": 2.0, "products": 1.0}).bound_by
        'memory'
        """
        return max(self.seconds, key=lambda resource: self.seconds[resource])

    @property
    def least_seconds(self) -> float:
        """The time that the bottleneck needs if it is never idle.

        Examples
        --------
        >>> KernelRoofline("k", 0, 0, 0, 8, 8, {"memory": 2.0, "products": 1.0}).least_seconds
        2.0
        """
        return self.seconds[self.bound_by]


@explains_keywords
@dataclass(frozen=True)
class Roofline:
    """The lower bounds of the kernels of a pass, as `cuflash.study.roofline` returns them.

    Parameters
    ----------
    device : str
        The name of the GPU.
    kernels : tuple of KernelRoofline
        The kernels, in launch order.
    measured_seconds : float, optional
        The measured time of the pass.

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
        """The sum of the kernels' lower bounds, which the pass cannot beat.

        Examples
        --------
        >>> kernel = KernelRoofline("k", 0, 0, 0, 8, 8, {"memory": 2.0})
        >>> Roofline("H100", (kernel, kernel)).least_seconds
        4.0
        """
        return sum(kernel.least_seconds for kernel in self.kernels)

    @property
    def bound_by(self) -> str:
        """The bottleneck of the kernel with the largest lower bound.

        Examples
        --------
        >>> kernel = KernelRoofline("k", 0, 0, 0, 8, 8, {"memory": 2.0})
        >>> Roofline("H100", (kernel,)).bound_by
        'memory'
        """
        return max(self.kernels, key=lambda kernel: kernel.least_seconds).bound_by if self.kernels else "nothing"

    def measured(self, seconds: float) -> Roofline:
        """Return a copy with the measured time of the pass, to compare it with the lower bound.

        Parameters
        ----------
        seconds : float
            The total time of all kernels of the pass.

        Returns
        -------
        Roofline
            A roofline with a `share`.

        Raises
        ------
        UnsupportedProblem
            `seconds` is not a positive number.

        Examples
        --------
        >>> kernel = KernelRoofline("k", 0, 0, 0, 8, 8, {"memory": 2.0})
        >>> Roofline("H100", (kernel,)).measured(4.0).share
        0.5
        """
        if not is_number(seconds) or not 0 < seconds < np.inf:
            raise UnsupportedProblem(f"seconds must be a positive number; got {describe(seconds)}")
        return replace(self, measured_seconds=float(seconds))

    @property
    def share(self) -> float:
        """The lower bound divided by the measured time: at most 1, unless a rate of `Peaks` is wrong.

        Examples
        --------
        >>> Roofline("H100", ()).measured(1.0).share
        0.0
        """
        if self.measured_seconds is None:
            raise UnsupportedProblem("measured_seconds must be known for a share; got None: call .measured(seconds)")
        return self.least_seconds / self.measured_seconds

    def __str__(self) -> str:
        lines = [_describe(kernel) for kernel in self.kernels]
        lines.append(f"{'at least':<26}{self.least_seconds * 1e3:>10.4f} ms  on {self.device}")
        if self.measured_seconds is not None:
            measured = f"{self.measured_seconds * 1e3:>10.4f} ms"
            lines.append(f"{'measured':<26}{measured}  {self.share:.1%} of it is the bound")
        return "\n".join(lines)


@explains_keywords
def roofline(plan: Plan | KernelPlan, *, which: str = "forward", peaks: Peaks | None = None) -> Roofline:
    """Compute a lower bound on the time of a planned pass from the work and memory traffic of its kernels.

    Parameters
    ----------
    plan : Plan or KernelPlan
        The result of `cuflash.plan` for a GPU. With ShapeDtype and `device=` a plan needs neither arrays nor a GPU.
    which : {"forward", "backward"}
        The pass.
    peaks : Peaks, optional
        Peak rates of the GPU. Default: the rates in cuflash's table of GPUs.

    Returns
    -------
    Roofline
        A printable record.

    Raises
    ------
    TypeError
        `plan` is not a plan.
    UnsupportedProblem
        The plan is for the host, or the pass or the rates of the GPU are unknown.

    Notes
    -----
    The products take 2 (head_dim + value_dim) operations per kept element in the forward pass, and
    2 (3 head_dim + 2 value_dim) in a backward pass of one kernel. Masked elements inside a visited block do not count.
    Each array counts once for each kernel that reads or writes it. A kernel whose arrays are in the level-2 cache can
    therefore be faster than its memory bound.

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
        raise TypeError(f"plan must be a result of cuflash.plan; got {describe(plan)}")
    reasons = []
    if not isinstance(which, str) or which not in _PASSES:
        reasons.append(f"which must be 'forward' or 'backward'; got {describe(which)}")
    if peaks is not None and not isinstance(peaks, Peaks):
        reasons.append(f"peaks must be a Peaks or None; got {describe(peaks)}")
    if kernel_plan.kernels is None:
        fix = "plan with device=cuflash.DeviceSpec.gpu('H100'), for example"
        reasons.append(f"plan must be for a GPU; got a plan for the host: {fix}")
    if reasons or kernel_plan.kernels is None:
        raise UnsupportedProblem(reasons)
    rates = Peaks.of(kernel_plan.device) if peaks is None else peaks
    device = kernel_plan.device
    if kernel_plan.is_empty:
        return Roofline(device.name, ())
    kernels = kernel_plan.kernels.forward if which == "forward" else kernel_plan.kernels.backward
    num_kept, num_visited = _elements(kernel_plan)
    sizes = _array_bytes(kernel_plan, kernels)
    launches = kernels.launches.values()
    return Roofline(
        device.name,
        tuple(_bounded(kernel_plan, launch, rates, num_kept, num_visited, sizes) for launch in launches),
    )


def _bounded(
    plan: KernelPlan, launch: Launch, peaks: Peaks, num_kept: int, num_visited: int, sizes: dict[str, int]
) -> KernelRoofline:
    """Return the work and the times of one kernel."""
    problem, spec = plan.problem, launch.spec
    of_head, of_value = spec.entry.products
    flops = 2 * num_kept * (of_head * problem.head_dim + of_value * problem.value_dim)
    special, others = (0, 0) if spec.score is None else _operations(spec.score)
    exponentials = num_kept * (special + spec.entry.has_exponentials)
    operations = num_kept * others
    hbm = sum(sizes[name] for name in dict.fromkeys((*launch.reads, *launch.writes)) if name != "dlse")
    row = (problem.head_dim * (of_head > 0) + problem.value_dim * (of_value > 0)) * problem.dtype.itemsize
    height = spec.block_kv if spec.entry.holds_keys else spec.block_q
    shared = problem.group_size if spec.pack_gqa else 1
    l2 = hbm + num_visited * row // (height * shared)
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
    """Return the time in seconds for an amount of work; it is infinite if the chip has no unit for this work."""
    return amount / rate if rate else np.inf if amount else 0.0


def _product_rate(plan: KernelPlan, launch: Launch, peaks: Peaks) -> float:
    """Return the FLOPs per cycle and multiprocessor of the units that compute a kernel's products."""
    spec, dtype = launch.spec, plan.problem.dtype
    if spec.precision != "ieee":
        return peaks.tensor_tf32 / (3 if spec.precision == "tf32x3" else 1)
    if dtype == np.float64:
        return peaks.tensor_64 if spec.mma_rows else peaks.flops_64
    # Tensor cores multiply 16-bit elements; kernels that use them round weights to 16 bits.
    return peaks.tensor_16 if FAMILIES[spec.family].rounds_weights else peaks.flops_32


def _operations(program: Program) -> tuple[int, int]:
    """Return how many special functions and other operations a score program computes for each score."""
    per_score = [
        instruction.op
        for instruction, on in zip(program.instructions, depends(program))
        if ("s" in on or {"i", "j"} <= on) and instruction.args
    ]
    special = sum(op in PRIMITIVES and PRIMITIVES[op].is_special for op in per_score)
    return special, len(per_score) - special


def _elements(plan: KernelPlan) -> tuple[int, int]:
    """Return how many elements the mask allows, and how many the work list visits, in all batch entries and heads."""
    work, shape = plan.work.on_host, plan.problem.mask_shape
    counts: dict[tuple[int, int], tuple[int, int]] = {}
    num_kept = num_visited = 0
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
        num_kept, num_visited = num_kept + counts[owner][0], num_visited + counts[owner][1]
    return num_kept, num_visited


def _array_bytes(plan: KernelPlan, kernels: Pass) -> dict[str, int]:
    """Return the bytes of each array of a pass by name."""
    problem = plan.problem
    itemsize = problem.dtype.itemsize
    sizes = {name: prod(shape) * itemsize for name, shape in problem.argument_shapes().items()}
    sizes["o"] = sizes["do"] = prod(problem.o_shape()) * itemsize
    sizes["lse"] = prod(problem.lse_shape()) * problem.accumulator.itemsize
    sizes |= {name: prod(gradient.shape) * gradient.dtype.itemsize for name, gradient in plan.kernel_gradients.items()}
    sizes |= {operand.key: prod(operand.shape) * operand.dtype.itemsize for operand in problem.operands}
    return sizes | {name: workspace.nbytes for name, workspace in kernels.workspaces.items()}


def _describe(kernel: KernelRoofline) -> str:
    work = f"{kernel.flops // 10**6} MFLOP, {kernel.exponentials // 10**6} M exponentials"
    work += f", {kernel.hbm_bytes // 10**6} MB, {kernel.l2_bytes // 10**6} MB of L2"
    return f"{kernel.name:<26}{kernel.least_seconds * 1e3:>10.4f} ms  by {kernel.bound_by}: {work}"


_COUNTS = ("heads", "length", "kv-heads", "kv-length", "batch", "head-dim")


def roofline_report(arguments: Sequence[str]) -> str:
    """Return the output of ``python -m cuflash roofline``.

    Examples
    --------
    >>> print(roofline_report("--heads 32 --length 65536 --device H100 --causal --measured 40".split()))
    sm90_forward                 32.8668 ms  by products: 35184908 MFLOP, 68720 M exponentials, 2155 MB, 185765 MB of L2
    at least                     32.8668 ms  on H100
    measured                     40.0000 ms  82.2% of it is the bound
    """
    parser = argparse.ArgumentParser("python -m cuflash roofline", description="the least time of a pass on a GPU")
    for name, meaning in (("heads", "query heads"), ("length", "number of queries, and of keys by default")):
        parser.add_argument(f"--{name}", type=int, required=True, help=meaning)
    parser.add_argument("--kv-heads", type=int, help="key/value heads; default: as many as query heads")
    parser.add_argument("--kv-length", type=int, help="number of keys; default: the number of queries")
    parser.add_argument("--batch", type=int, default=1, help="batch size; default: 1")
    parser.add_argument("--head-dim", type=int, default=128, help="head_dim of q, k and v; default: 128")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of q, k and v; default: bfloat16")
    parser.add_argument("--device", default="H100", type=_device_of_word, help="name of the GPU; default: H100")
    parser.add_argument("--kernel", default="auto", help="kernel family; default: auto")
    parser.add_argument("--causal", action="store_true", help="causal attention, with the last query at the last key")
    parser.add_argument("--backward", action="store_true", help="the backward pass instead of the forward pass")
    parser.add_argument("--measured", type=float, help="measured time of the pass in milliseconds")
    flags = parser.parse_args(arguments)
    counts = {name: getattr(flags, name.replace("-", "_")) for name in _COUNTS}
    low = {name: count for name, count in counts.items() if count is not None and count < 1}
    reasons = [f"--{name} must be at least 1; got {count}" for name, count in low.items()]
    if flags.measured is not None and not 0 < flags.measured < np.inf:
        reasons.append(f"--measured must be a positive number; got {flags.measured:g}")
    if reasons:
        parser.error("; ".join(reasons))
    try:
        return _report(flags)
    except UnsupportedProblem as error:
        parser.error("; ".join(error.reasons))


def _device_of_word(word: str) -> DeviceSpec:
    try:
        return DeviceSpec.gpu(word)
    except UnsupportedProblem as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _report(flags: argparse.Namespace) -> str:
    dtype = as_dtype("--dtype", flags.dtype)
    kv_heads = flags.heads if flags.kv_heads is None else flags.kv_heads
    kv_length = flags.length if flags.kv_length is None else flags.kv_length
    q = ShapeDtype((flags.batch, flags.heads, flags.length, flags.head_dim), dtype)
    kv = ShapeDtype((flags.batch, kv_heads, kv_length, flags.head_dim), dtype)
    causal: Causality = "bottom_right" if flags.causal else False
    ready = planned(q, kv, kv, causal=causal, kernel=flags.kernel, device=flags.device)
    bound = roofline(ready, which="backward" if flags.backward else "forward")
    return str(bound if flags.measured is None else bound.measured(flags.measured / 1e3))
