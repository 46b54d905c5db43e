"""How close do the simt kernels come to a GPU's rate of multiply-adds, and what is the overhead of a call?

    python -m experiments simt_speed        # needs an NVIDIA GPU and CuPy

Rates are the products of the paper (forward 2, backward 5 of seqlen_q * seqlen_kv * dim multiply-adds, without a mask)
divided by the median time of calls between two events, relative to the rate of a loop of multiply-adds on the same card
in the same run. The backward pass computes these five products, with dQ summed by atomic additions; with
deterministic=True, where every result is bitwise reproducible, it computes seven, dQ by rows and dK and dV by columns,
so that the rows of both show the cost of determinism. The naive kernels, which store whole matrices of scores, are the
baseline. Block-sparse rates are per kept block, relative to the dense rate. Host time is the time of a call without the
device's work; a work list is timed until it is on the device; memory is the peak of CuPy's pool without arguments and
results. Kernels are compiled one after another. For tensor-core kernels there are the sum of a plan's compile times,
and the time of `plan.compile()`, which compiles them in parallel, in a new process without a cache.

Expect: half of the rate of multiply-adds in the forward pass, because the registers of a thread limit how rarely shared
memory is read.
Found:  on an H100, the float32 forward pass reaches 0.59 and 0.55 of the rate of multiply-adds at head_dim 64 and 128,
and the backward pass, which adds to dq by atomics and so computes five products instead of seven, 0.48 and 0.45;
float64, on tensor cores, reaches 0.85 and 0.98 forward, and 0.68 and 0.61 backward. At a density of 0.125, the forward
pass runs at 0.91 of its dense rate, the backward pass at 0.99. The naive kernels reach 0.12 to 0.17 forward, 0.15 to
0.16 backward. A warm call occupies the host for 19 to 22 microseconds, and gradients for 36; on other hosts of the same
type, 21 to 40 and 36 to 69 (simt_tiles.log at commit b648872e). The work list of causal attention within documents at
128k tokens is on the device after 0.7 to 0.9 ms. The slowest simt kernel takes 1.6 s to compile, and up to 2.1 s on
those other hosts. On the slowest of them, `plan.compile()` takes 3.4 to 3.7 s without a cache for sm80's kernels and
3.2 to 3.6 s for sm90's, whose separate compile times add up to 5.5 to 6.4 s and 5.5 to 5.8 s.

Cost: Minutes of a GPU, most of them for compiling.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from cuflash import masks
from cuflash.compiler import nvrtc
from cuflash.executors import gpu
from cuflash.planning.device import DeviceSpec
from cuflash.planning.plan import KernelPlan
from cuflash.blocks.work_list import requested_mask, work_list
from device_memory import peak_on_device
from harness import Record, gpu_versions, main, time_alternately, time_on_device, track, why_no_gpu
from mask_compile import document_ids
from rich.table import Table
from workloads import draw


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shapes of the published run."""

    num_heads: int = 32
    seqlen: int = 4096
    head_dims: tuple[int, ...] = (64, 128)
    compile_dims: tuple[int, ...] = (64, 128, 256)
    densities: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    block: int = 128
    memory_seqlen: int = 65536
    documents_seqlen: int = 2**17
    repeats: int = 7
    host_calls: int = 10000
    cold_starts: int = 3

    def __post_init__(self) -> None:
        counts = (self.num_heads, self.seqlen, self.block, self.memory_seqlen, self.documents_seqlen)
        counts += (self.repeats, self.host_calls, self.cold_starts, *self.head_dims, *self.compile_dims)
        if min(counts) < 1 or not all(0 < d <= 1 for d in self.densities):
            raise ValueError("counts, lengths and dims must be positive, densities in (0, 1]")


MULTIPLY_ADDS = """
extern "C" __global__ void multiply_adds(T* x, int n) {
  T a[16];
  for (int i = 0; i < 16; ++i) a[i] = x[i] + threadIdx.x;
  const T b = x[0], c = x[1];
  for (int k = 0; k < n; ++k) {
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = a[i] * b + c;
  }
  T sum = 0;
  for (int i = 0; i < 16; ++i) sum += a[i];
  if (sum == T(12345)) x[0] = sum;
}
"""


def multiply_adds_rate(dtype: Any, repeats: int) -> float:
    """Return the TFLOP/s of a loop of independent multiply-adds with 2,048 threads per multiprocessor."""
    import cupy

    name = {"float32": "float", "float64": "double"}[np.dtype(dtype).name]
    kernel = cupy.RawKernel(f"using T = {name};{MULTIPLY_ADDS}", "multiply_adds")
    blocks, threads, steps = 8 * gpu.current_device().num_processors, 256, 4096
    x = cupy.ones(16, dtype)
    calls = {name: lambda: kernel((blocks,), (threads,), (x, np.int32(steps)))}
    return 2 * 16 * blocks * threads * steps / time_on_device(calls, repeats=repeats)[name].median_ms / 1e9


def tensor_core_families(device: DeviceSpec) -> list[str]:
    """Return the tensor-core families that a device runs."""
    capability = device.compute_capability or (0, 0)
    return [family for family, runs in (("sm80", capability >= (8, 0)), ("sm90", capability == (9, 0))) if runs]


def check(q: Any, k: Any, v: Any, o: Any) -> None:
    """Assert that the first 64 queries of the timed call's first head are within the bounds of the reference."""
    q, k, v, o = (x[:1].get() for x in (q[:, :64], k, v, o[:, :64]))
    error = np.abs(o - cuflash.reference.attention(q, k, v)[0])
    if not (error <= cuflash.error_bound(q, k, v).o).all():
        raise AssertionError(f"the forward to be timed is wrong by {error.max():.3g}")


def run_rates(config: Config) -> list[Record]:
    """Time dense forward and backward, tiled and naive, relative to the multiply-add rate of the accumulation dtype."""
    records = []
    for dtype, narrower in ((np.float32, np.float16), (np.float64, None)):
        peak = multiply_adds_rate(dtype, config.repeats)
        records.append({"measure": "multiply-adds", "dtype": np.dtype(dtype).name, "tflops": peak})
        for head_dim in track(config.head_dims, f"rates, {np.dtype(dtype)}"):
            records += rates(config, dtype, head_dim, "simt", peak)
            if narrower is not None:
                records += rates(config, dtype, head_dim, "naive", peak)
                records += rates(config, narrower, head_dim, "naive", peak)
    return records


def rates(config: Config, dtype: Any, head_dim: int, kernel: str, peak: float) -> list[Record]:
    """Yield the rates of both passes of a family, and of its deterministic backward pass if that uses other kernels."""
    q, k, v, do = draw(config.num_heads, config.seqlen, head_dim, dtype=dtype)
    plan = cuflash.plan(q, k, v, kernel=kernel)
    o, lse = plan.forward(q, k, v)
    check(q, k, v, o)
    calls = both_passes(plan, q, k, v, do, o, lse)
    if kernel == "simt":
        repeatable = cuflash.plan(q, k, v, kernel=kernel, deterministic=True)
        calls["backward, deterministic"] = both_passes(repeatable, q, k, v, do, o, lse)["backward"]
    flops = 4 * config.num_heads * config.seqlen**2 * head_dim
    records = []
    for name, (ms, spread, _) in time_on_device(calls, repeats=config.repeats).items():
        rate = (1 if name == "forward" else 2.5) * flops / ms / 1e9
        row: Record = {"measure": name if kernel == "simt" else f"{kernel} {name}", "dtype": np.dtype(dtype).name}
        row |= {"seqlen": config.seqlen, "head_dim": head_dim, "ms": ms, "spread_ms": spread}
        records.append(row | {"tflops": rate, "ratio": rate / peak})
    return records


def both_passes(plan: Any, q: Any, k: Any, v: Any, do: Any, o: Any, lse: Any) -> dict[str, Callable[[], object]]:
    """Return the two calls of a plan on these arrays."""
    return {"forward": lambda: plan.forward(q, k, v), "backward": lambda: plan.backward(do, q, k, v, o, lse)}


def run_densities(config: Config) -> list[Record]:
    """Time random blocks: the rate of kept blocks relative to the dense rate."""
    q, k, v, do = draw(config.num_heads, config.seqlen, config.head_dims[0])
    grid = -(-config.seqlen // config.block)
    dense: dict[str, float] = {}
    records = []
    for density in track(config.densities, "densities"):
        blocks = np.zeros((grid, grid), bool)
        blocks.flat[np.random.default_rng(1).permutation(grid * grid)[: round(density * grid * grid)]] = True
        plan = cuflash.plan(q, k, v, mask=masks.BlockPattern(blocks, config.block))
        o, lse = plan.forward(q, k, v)
        calls = both_passes(plan, q, k, v, do, o, lse)
        for name, (ms, spread, _) in time_on_device(calls, repeats=config.repeats).items():
            base = dense.setdefault(name, ms / float(blocks.mean()))
            row = {"measure": f"block-sparse {name}", "dtype": "float32", "seqlen": config.seqlen}
            row |= {"head_dim": config.head_dims[0], "density": float(blocks.mean()), "ms": ms, "spread_ms": spread}
            records.append(row | {"ratio": base * float(blocks.mean()) / ms})
    return records


def run_costs(config: Config) -> list[Record]:
    """Measure the host time of a warm call, the time of building a work list on the device, and the workspace."""
    import cupy

    records = []
    # The kernels take less time than the calls, because longer ones could fill the queue and delay calls.
    q, k, v, do = draw(2, 4, 16, 64)
    others = [[x.copy() for x in (q, k, v)] for _ in range(8)]
    dilated, vjps = masks.Dilated(3), [cuflash.attention_vjp(*arrays)[1] for arrays in others]
    calls: dict[str, Callable[[int], object]] = {
        "dense": lambda turn: cuflash.attention(*others[turn]),
        "causal": lambda turn: cuflash.attention(*others[turn], causal=True),
        "dilated": lambda turn: cuflash.attention(*others[turn], mask=dilated),
        "gradients": lambda turn: vjps[turn](do),
    }
    halves = [[x.astype(np.float16) for x in arrays] for arrays in others]
    for family in tensor_core_families(gpu.current_device()):
        calls[f"kernel='{family}'"] = lambda turn, family=family: cuflash.attention(*halves[turn], kernel=family)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in track(range(config.host_calls), "host"):
        for name, call in calls.items():  # alternately, so that temporary slowness of the host affects all calls
            begin = time.perf_counter()
            call(turn % 8)
            seconds[name].append(time.perf_counter() - begin)
        if turn % 10 == 9:
            cupy.cuda.Device().synchronize()
    for name, taken in seconds.items():
        records.append({"measure": f"host time of a call, {name}", "us": float(np.median(taken[100:]) * 1e6)})
    ids, shape = cupy.asarray(document_ids(config.documents_seqlen, 1000)), config.documents_seqlen
    frame, packed = masks.MaskShape((), 1, shape, shape), masks.Causal() & masks.Documents(ids)

    def make_list() -> None:
        work_list(requested_mask(packed, False, None, frame, cupy), frame, (64, 64))
        cupy.cuda.get_current_stream().synchronize()

    ms, spread, _ = time_alternately({"list": make_list}, repeats=config.repeats, warmup=3)["list"]
    row = {"measure": "work list, causal & documents", "seqlen": shape, "ms": ms, "spread_ms": spread}
    return [*records, row, *run_memory(config)]


def run_memory(config: Config) -> list[Record]:
    """Return the peak of CuPy's memory pool during a forward and a backward call, without arguments and results."""
    q, k, v, do = draw(1, config.memory_seqlen, 64)
    plan = cuflash.plan(q, k, v, window=(1023, 0))
    plan.compile()
    records = []
    o, lse = plan.forward(q, k, v)
    for name, call, results in (
        ("forward", lambda: plan.forward(q, k, v), o.nbytes + lse.nbytes),
        ("backward", lambda: plan.backward(do, q, k, v, o, lse), q.nbytes + k.nbytes + v.nbytes),
    ):
        workspace = peak_on_device(call)[1] - results
        measure = f"memory beside arrays, {name}"  # codespell:ignore
        row = {"measure": measure, "seqlen": config.memory_seqlen, "head_dim": 64}
        records.append(row | {"mib": workspace / 2**20, "ratio": plan.workspace_bytes / 2**20})
    return records


def compile_alone(plan: KernelPlan, device: DeviceSpec) -> list[nvrtc.Compiled]:
    """Compile a plan's kernels one after another."""
    assert device.compute_capability is not None
    return [kernel for spec in plan.specs.values() for kernel in nvrtc.precompile([spec], device.compute_capability)]


def compile_rates(config: Config, device: DeviceSpec) -> None:
    """Compile the kernels whose rates are measured."""
    kinds = ((np.float32, "simt"), (np.float64, "simt"), (np.float32, "naive"), (np.float16, "naive"))
    for (dtype, kernel), head_dim in itertools.product(kinds, config.head_dims):
        x = cuflash.ShapeDtype((config.num_heads, config.seqlen, head_dim), np.dtype(dtype))
        for deterministic in (False, True):
            options = {"kernel": kernel, "deterministic": deterministic, "executor": "gpu", "device": device}
            compile_alone(cuflash.plan(x, x, x, **options)._plan, device)


# Runs in a separate process, which has compiled nothing. `sys.argv`: kernel, heads, seqlen, head_dim.
CHILD = """
import sys, time
import cupy, cuflash, ml_dtypes, numpy as np
kernel, shape = sys.argv[1], tuple(map(int, sys.argv[2:]))
cupy.cuda.Device().synchronize()
x = cuflash.ShapeDtype(shape, np.dtype(ml_dtypes.bfloat16))
plan = cuflash.plan(x, x, x, kernel=kernel, executor="gpu")
start = time.perf_counter()
plan.compile()
seconds = time.perf_counter() - start
assert not any(made.is_from_cache for made in cuflash.cache_info().compiled)
print(seconds)
"""


def seconds_from_cold(kernel: str, *shape: int) -> float:
    """Return how long `plan.compile()` takes if no kernel is cached."""
    with tempfile.TemporaryDirectory() as empty:
        paths = [str(Path(cuflash.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"CUPY_CACHE_DIR": empty, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-c", CHILD, kernel, *map(str, shape)]
        return float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def run_compile(config: Config, device: DeviceSpec) -> list[Record]:
    """Measure the compile times of tensor-core kernels for both passes: the sum over kernels, and all in parallel."""
    records = []
    cases = list(itertools.product(tensor_core_families(device), config.compile_dims))
    for kernel, head_dim in track(cases, "compiling"):
        x = cuflash.ShapeDtype((config.num_heads, config.seqlen, head_dim), np.dtype(ml_dtypes.bfloat16))
        ready = cuflash.plan(x, x, x, kernel=kernel, executor="gpu", device=device)
        kernels = compile_alone(ready._plan, device)
        row = {"measure": f"compile, sum of kernel='{kernel}'", "dtype": "bfloat16", "head_dim": head_dim}
        row |= {"from_cache": any(each.is_from_cache for each in kernels)}
        records.append(row | {"ms": 1e3 * sum(each.seconds for each in kernels)})
        row = {"measure": f"compile, at once of kernel='{kernel}'", "dtype": "bfloat16", "head_dim": head_dim}
        shape = config.num_heads, config.seqlen, head_dim
        ms = [1e3 * seconds_from_cold(kernel, *shape) for _ in range(config.cold_starts)]
        records.append(row | {"ms": float(np.median(ms)), "spread_ms": max(ms) - min(ms), "from_cache": False})
    return records


def run(config: Config) -> list[Record]:
    """Return one record for every measurement, with the versions that GPU measurements depend on."""
    if reason := why_no_gpu():
        sys.exit(f"simt_speed times kernels on a GPU: {reason}")
    nvrtc.current_device()
    versions = gpu_versions()
    compile_rates(config, gpu.current_device())
    records = run_rates(config) + run_densities(config) + run_costs(config)
    records += run_compile(config, gpu.current_device())
    for each in cuflash.cache_info().compiled:
        row = {"measure": f"compile, {each.spec.name}", "dtype": each.spec.dtype.name, "head_dim": each.spec.head_dim}
        row |= {"from_cache": each.is_from_cache, "ms": each.seconds * 1e3}
        records.append(row | {"registers": each.resources.registers})
    return [record | versions for record in records]


def table(records: list[Record]) -> Table:
    """Tabulate the measurements."""
    result = Table(title="simt kernels")
    columns = ("measure", "dtype", "seqlen", "head_dim", "density", "ms", "tflops", "ratio", "us", "mib", "registers")
    for column in columns:
        result.add_column(column, justify="left" if column in ("measure", "dtype") else "right")
    for row in records:
        cells = (row.get(name, "") for name in columns)
        result.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    return result


if __name__ == "__main__":
    main(Config, run, table)
