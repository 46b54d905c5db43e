"""Are repeated calls on a GPU bitwise equal, and do NVIDIA's sanitizers report nothing?

    python -m experiments gpu_proof                                                # needs CuPy and a GPU
    python -m experiments gpu_proof --sections repeats
    python -m experiments gpu_proof --sections sanitizers --jobs 16                # 16 processes at a time
    python -m experiments gpu_proof --sections sanitizers --tools racecheck --families sm90

`repeats`: for each tensor-core family, dtype, head_dim and mask, makes `forwards` forward calls and `gradients`
backward calls (dk and dv of the default call, and all three gradients with deterministic=True). Each call has several
thread blocks per block slot of the GPU. Its results are compared bitwise on the device with those of the first call;
the host waits only at the end. If a backward call uses another family, the call is counted for that family.

`sanitizers`: runs `cases`, which together with calls on KV caches launch every kernel that the GPU can run, in `parts`
child processes for each tool of compute-sanitizer and each family, `jobs` processes at a time. CuPy's memory pool is
disabled, so that each array is a separate allocation. No kernel is excluded, not even CuPy's, because initcheck treats
memory that it has not seen written as uninitialized. As a control, initcheck must report errors in one case per family
in which k is left unwritten. sm90 has no control, since initcheck does not see reads by the tensor memory accelerator
(TMA). It does not see TMA's writes either, so o and the sums of dQ are set to zero before sm90's kernels write them.
racecheck runs on sm90's kernels with watchdogs: it does not track the order that __syncwarp establishes between lanes,
and with a watchdog every lane arrives at barriers, instead of one lane per warp.

Rows of the result that a run does not measure are left unchanged; the run ends with an error if a row shows a failure.

Expect: no repeat differs, no tool reports an error, and initcheck reports errors if k is unwritten.
Found:  no repeat of sm80 and sm90 differs, over 24,000 forward calls and 4,400 gradients. initcheck reports the
unwritten arrays. All other reports are eight of racecheck, for sm90's gradients that finish dQ, where it does not
follow bar.arrive (steps 28 and 29 of sm90_steps.log at commit b648872e).

Cost: Half an hour of a GPU, most of it under the sanitizers.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import cuflash
import numpy as np
from cuflash import BlockIndex, masks
from cuflash.compiler import nvrtc
from cuflash.executors import gpu
from cuflash.planning.device import DeviceSpec
from cuflash.plans import Plan
from cuflash.planning.plan import KernelPlan
from cuflash.testing import Structure
from cuflash.planning.families import sm90
from cuflash.planning.families.family import Request
from cuflash.arrays import as_dtype
from cuflash.planning.appending import append_spec, bounds_spec
from cuflash.planning.captured_sums import sums_spec
from cuflash.planning.decoding import decode_reasons, decode_spec
from cuflash.planning.prefill import intervals_spec, prefill_reasons, prefill_spec
from cuflash.planning.launches import Launch
from cuflash.planning.chosen_lists import COLUMN_SPECS, UNIONS
from cuflash.planning.interval_kernels import INTERVAL_SPECS
from cuflash.planning.list_kernels import LIST_SPECS
from cuflash.planning.page_choice import every_page_spec
from cuflash.planning.query_scores import every_query_spec
from cuflash.planning.selection_kernels import every_selection_spec
from cuflash.planning._result_kernels import every_result_spec
from cuflash.planning.problem import Problem
from cuflash.planning.families.sm90_fp8 import Sm90Fp8
from cuflash.planning.quantizing import quantize_spec, transpose_spec
from cuflash.planning.scales import RowsPerScale
from cuflash.planning.spec import KernelSpec
from cuflash.planning.routing import FAMILIES, mass_kernel
from harness import FOLDERS, Record, check_names, gpu_versions, main, track, why_no_gpu
from rich.table import Table
from sim_against_gpu import LAYOUTS, masked, to_device
from simt_speed import tensor_core_families
from workloads import draw

SECTIONS = ("repeats", "sanitizers")
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SLOWEST_FIRST = ("racecheck", "memcheck", "initcheck", "synccheck")
OPTIONS = {"memcheck": ("--report-api-errors", "no")}  # CuPy asks the driver for functions that the driver may lack
# Tools that run with CUFLASH_CHECK, so that every lane arrives at sm90's barriers, as racecheck needs.
WATCHED = ("racecheck",)
UNSEEN = ("sm90",)  # families whose k, o and sums of dQ are accessed by TMA, which initcheck does not see
CONTROL = "initcheck, k unwritten"  # control runs, which must report errors


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration; the defaults are those of the published run."""

    sections: tuple[str, ...] = SECTIONS
    families: tuple[str, ...] = tuple(FAMILIES)
    tools: tuple[str, ...] = TOOLS
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    head_dims: tuple[int, ...] = (64, 128, 256)
    batch: int = 2
    hidden: int = 2048
    seqlen: int = 4096
    block: int = 128
    forwards: int = 1000
    gradients: int = 100
    seqlen_q: int = 200
    seqlen_kv: int = 134
    timeout_s: int = 560
    jobs: int = 1
    parts: int = 4  # processes that share the cases of a tool and a family

    def __post_init__(self) -> None:
        known = {"sections": SECTIONS, "families": tuple(FAMILIES), "tools": TOOLS, "dtypes": ("float16", "bfloat16")}
        check_names(self, known)
        if self.seqlen % self.block or any(self.hidden % dim for dim in self.head_dims):
            raise ValueError("block must divide seqlen, and head_dims hidden")


def families(config: Config, device: DeviceSpec) -> list[str]:
    """Return the configured families that the device can run."""
    of_tensor_cores = tensor_core_families(device)
    runs = {"simt", "naive", *of_tensor_cores, *(("fa1",) if "sm80" in of_tensor_cores else ())}
    return [family for family in config.families if family in runs]


# Repeats


class BoundCall(NamedTuple):
    """A call that must return equal bits each time."""

    way: str
    family: str
    dtype: str
    head_dim: int
    mask: str
    ready: Plan
    calls: int


def repeated_calls(config: Config, device: DeviceSpec) -> Iterator[BoundCall]:
    """Yield calls for every tensor-core family, dtype, head_dim and mask, in both passes."""
    rng, side = np.random.default_rng(0), config.seqlen // config.block
    kinds: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "blocks": {"mask": masks.BlockPattern(rng.random((side, side)) < 0.25, config.block)},
    }
    for family in families(config, device):
        if family not in ("sm80", "sm90"):
            continue
        for dtype, head_dim, mask in ((x, y, z) for x in config.dtypes for y in config.head_dims for z in kinds):
            heads = config.hidden // head_dim
            x = cuflash.ShapeDtype((config.batch, heads, config.seqlen, head_dim), dtype)
            for way in ("forward", "gradients", "gradients, deterministic"):
                deterministic = way.endswith("deterministic")
                options = {"kernel": family, "deterministic": deterministic, "executor": "gpu", "device": device}
                ready = cuflash.plan(x, x, x, **options, **kinds[mask])
                calls = config.forwards if way == "forward" else config.gradients
                if way == "forward" or any(launch.spec.family == family for launch in walks(ready._plan)):
                    yield BoundCall(way, family, dtype, head_dim, mask, ready, calls)


def walks(plan: KernelPlan) -> list[Launch]:
    """Return the launches of the backward pass whose kernels multiply matrices."""
    launches = plan.kernels.backward.launches
    return [launches[role] for role in launches if role not in ("backward_statistics", "convert_dq")]


def bits(x: Any) -> Any:
    """Return an array as unsigned integers, because NaN is unequal to itself and -0 equals 0."""
    return x.view(f"uint{8 * x.dtype.itemsize}")


def differing(call: Callable[[], Sequence[Any]], calls: int) -> int:
    """Return how many calls returned other bits than the first; no other function synchronizes the host."""
    import cupy

    expected, count = [bits(x) for x in call()], cupy.zeros((), np.int64)
    for _ in range(calls - 1):
        count += reduce(or_, [(bits(x) != first).any() for x, first in zip(call(), expected, strict=True)])
    return int(count)


def run_repeats(config: Config, device: DeviceSpec) -> Iterator[Record]:
    """Yield one record per kind of call, after all its kernels are compiled."""
    import cupy

    every = list(repeated_calls(config, device))
    size = config.batch * config.hidden * config.seqlen
    drawn = {dtype: draw(size, dtype=np.dtype(dtype)) for dtype in config.dtypes}
    nvrtc.precompile({spec for each in every for spec in each.ready._plan.specs.values()}, device.compute_capability)
    for way, family, dtype, head_dim, mask, ready, calls in track(every, "repeats"):
        plan = ready._plan
        q, k, v, do = (x.reshape(config.batch, -1, config.seqlen, head_dim) for x in drawn[dtype])
        o, lse = ready.forward(q, k, v)

        def call() -> list[Any]:
            if way == "forward":
                return list(ready.forward(q, k, v))
            dq, dk, dv = ready.backward(do, q, k, v, o, lse)
            return [dq, dk, dv] if way.endswith("deterministic") else [dk, dv]  # the order in which dq is summed varies

        begin = time.perf_counter()
        errors = differing(call, calls)
        launch = plan.kernels.forward.launches["forward"] if way == "forward" else walks(plan)[0]
        row: Record = {"section": "repeats", "check": way, "family": family, "dtype": dtype, "head_dim": head_dim}
        row |= {"mask": mask, "calls": calls, "errors": errors, "seconds": time.perf_counter() - begin}
        tiles = launch.tiles * plan.problem.mask_shape.num_batch
        yield row | {"waves": tiles / FAMILIES[launch.spec.family].resident_blocks(launch.spec, device)}
        cupy.get_default_memory_pool().free_all_blocks()


# Sanitizers: the calls

# applies to the choice of tiles inside the `with` block
as_of_large_calls = patch.object(sm90, "MIN_TILES_PER_PROCESSOR", 0)


class Case(NamedTuple):
    """A forward call and its gradients."""

    kernel: str
    precision: str
    deterministic: bool
    is_device_mask: bool  # the mask's arrays are on the device, and kernels build its list
    structure: Structure
    has_tangents: bool = False  # also computes the tangents of o and lse, and of gradients
    # Planned for a GPU with few multiprocessors, so that blocks finish dQ, as in calls with many heads.
    is_large: bool = False

    def device(self, device: DeviceSpec) -> DeviceSpec:
        """Return the device for which the case is planned."""
        return replace(device, num_processors=3) if self.is_large else device

    @property
    def options(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "precision": self.precision, "deterministic": self.deterministic}

    @property
    def makes_lists(self) -> bool:
        """True if kernels build the mask's block list at each call."""
        return self.is_device_mask and isinstance(
            self.structure.mask, (masks.Dense, masks.BlockPattern, masks.ChosenBlocks)
        )

    @property
    def mask(self) -> masks.Mask | BlockIndex | None:
        """The mask of the plan: its arrays are moved to q's device, or a block list replaces them."""
        mask, frame = self.structure.mask, self.structure.mask_shape
        if mask is None or isinstance(mask, masks.Causal) or self.is_device_mask:
            return mask
        return BlockIndex.from_mask(mask, block=mask._natural_block or 32, **frame._asdict())

    @as_of_large_calls
    def plan(self, device: DeviceSpec) -> KernelPlan:
        """Return the plan of a device, from shapes alone."""
        example = self.structure.example()
        shapes = [cuflash.ShapeDtype(x.shape, x.dtype) for x in (example.q, example.k, example.v)]
        sink = {} if example.sink is None else {"sink": cuflash.ShapeDtype(example.sink.shape, example.sink.dtype)}
        options = {**self.options, **sink, "wrt": tuple(sink), "device": self.device(device)}
        options |= {"dropout": example.dropout, "tangents": ("q", "k", "v") if self.has_tangents else ()}
        return cuflash.plan(*shapes, mask=self.mask, **options, executor="gpu")._plan


KERNELS = (
    ("sm90", "float16", "ieee"), ("sm90", "bfloat16", "ieee"),
    ("sm80", "float16", "ieee"), ("sm80", "bfloat16", "ieee"),
    ("sm80", "float32", "tf32"), ("sm80", "float32", "tf32x3"),
    ("simt", "float32", "ieee"), ("simt", "float64", "ieee"),
    ("naive", "float16", "ieee"), ("naive", "float32", "ieee"),
    ("fa1", "float16", "ieee"), ("fa1", "bfloat16", "ieee"),
)  # fmt: skip
DIMS = ((64, 64), (128, 128), (40, 24))
GROUPS = (1, 2, 4)


def kinds_of_mask(rows: int, keys: int) -> dict[str, masks.Mask | None]:
    """Return masks by the kind of work list that kernels walk."""
    rng = np.random.default_rng(0)
    some = {side: rng.random((-(-rows // side), -(-keys // side))) < 0.5 for side in (16, 128, 64)}
    some[128][0] = some[64][0] = True  # at least one row is listed
    return {
        "dense": None,
        "causal": masks.Causal("bottom_right"),
        "lengths": masks.Lengths(q=np.array([rows, rows // 2]), kv=np.array([keys // 3, keys])),
        "bits": masks.Dense(rng.random((4, rows, keys)) < 0.4),
        **{f"blocks of {side}": masks.BlockPattern(blocks, side) for side, blocks in some.items()},
    }


def cases(config: Config) -> Iterator[tuple[str, Case]]:
    """Yield the kind of mask and the case.

    Each mask is combined with each kernel; dims, GQA groups, strides and determinism alternate. Special cases follow: a
    sink; dropout; wide heads; many heads, for persistent blocks, the fused dQ epilogue and its fallback for long block
    lists; queries that choose their own blocks; and few queries, for split-KV and pack-GQA.
    """
    rows, keys = config.seqlen_q, config.seqlen_kv
    kinds = kinds_of_mask(rows, keys)
    for turn, (kernel, dtype, precision) in enumerate(KERNELS):
        if kernel not in config.families:
            continue

        def case(number: int, mask: masks.Mask | None = None, **others: Any) -> Case:
            head_dim, value_dim = DIMS[number % len(DIMS)]
            sizes: dict[str, Any] = {
                "q_batch": (2,), "k_batch": (2,), "v_batch": (2,), "num_heads": 4,
                "num_kv_heads": 4 // GROUPS[number // 2 % len(GROUPS)], "seqlen_q": rows, "seqlen_kv": keys,
                "head_dim": head_dim, "value_dim": value_dim, "dtype": dtype, "mask": mask,
                "layouts": (LAYOUTS[number % len(LAYOUTS)],) * 4 + ("contiguous",), "seed": number,
                "has_dlse": number // 2 % 2 == 0,
            }  # fmt: skip
            return Case(kernel, precision, number % 2 == 1, number // 3 % 2 == 1, Structure(**sizes | others))

        for number, (kind, mask) in enumerate(kinds.items(), turn):
            yield kind, case(number, mask)
        moves = precision == "ieee" and kernel not in ("fa1", "naive")
        if kernel != "fa1":
            causal, dropout = masks.Causal("bottom_right"), cuflash.Dropout(0.3, seed=turn)
            yield "dense", case(turn, sink=(4,))._replace(has_tangents=moves)
            yield "causal", case(turn, causal, dropout=dropout)._replace(has_tangents=moves)
        if moves:
            yield "lengths", case(turn, kinds["lengths"])._replace(has_tangents=True)
            yield "blocks of 64", case(turn, kinds["blocks of 64"])._replace(has_tangents=True)
        if kernel in ("sm80", "sm90"):
            for number in (0, 1):
                yield "dense", case(number, head_dim=256, value_dim=256)
        if kernel == "sm90":  # more tiles than blocks, so that each block computes several
            many = {"num_heads": 80, "num_kv_heads": 80, "seqlen_q": 70, "seqlen_kv": 100}
            yield "dense", case(0, **many, head_dim=64, value_dim=64)
            more = {"num_heads": 6, "num_kv_heads": 6, "seqlen_q": 140, "seqlen_kv": 140}
            causal = masks.Causal("bottom_right")
            yield "dense", case(0, **more, head_dim=128, value_dim=128)._replace(is_large=True)
            yield "causal", case(0, causal, **more, head_dim=64, value_dim=64)._replace(is_large=True)
            long, blocks = {"seqlen_q": 140, "seqlen_kv": 2200}, np.arange(36).reshape(2, 18) > 0
            yield "blocks of 128", case(0, masks.BlockPattern(blocks, 128), **long, head_dim=64, value_dim=64)
        if kernel == "sm80" and precision == "ieee":
            lists = np.random.default_rng(turn).integers(-1, -(-keys // 16), (1, rows, 3))
            for number in (0, 3):  # lists of a block index, and lists on the device
                yield "chosen blocks", case(number, masks.ChosenBlocks(lists, 16))
        if kernel == "sm80":
            for group_size in (1, 4):
                few = {"seqlen_q": 3, "seqlen_kv": 1100, "num_kv_heads": 4 // group_size}
                yield "few queries", case(turn, **few, head_dim=64, value_dim=64)
                if precision == "ieee":  # for a kernel that no family name selects
                    yield "few queries", case(turn, **few, head_dim=64, value_dim=64)._replace(kernel="auto")


def control(kernel: str) -> Case:
    """Return a case that reads all of k, on the fastest path of the family."""
    dtype = "float32" if kernel == "simt" else "float16"
    structure = Structure(q_batch=(1,), k_batch=(1,), v_batch=(1,), seqlen_q=128, seqlen_kv=128, head_dim=64,
                          value_dim=64, dtype=dtype)  # fmt: skip
    return Case(kernel, "ieee", False, False, structure)


# Sanitizers: the child process


@as_of_large_calls
def run_case(case: Case, *, leaves_k_unwritten: bool = False) -> None:
    """Run both passes of a case on the GPU."""
    import cupy

    example, layout = case.structure.example(), case.structure.layouts[0]
    q, k, v, do = (to_device(x, layout) for x in (example.q, example.k, example.v, example.do))
    if leaves_k_unwritten:
        k = cupy.empty(k.shape, k.dtype)
    mask = case.mask
    if isinstance(mask, masks.Mask):
        mask = masked(mask, "gpu")
    sink = {} if example.sink is None else {"sink": to_device(example.sink, "contiguous")}
    options = {**case.options, **sink, "wrt": tuple(sink), "device": case.device(gpu.current_device())}
    options["dropout"] = example.dropout
    ready = cuflash.plan(q, k, v, mask=mask, executor="gpu", **options)
    problem = ready._plan.problem
    out = cupy.zeros(problem.o_shape(), problem.dtype) if case.kernel in UNSEEN else None
    o, lse = ready.forward(q, k, v, out=out, **sink)
    dlse = None if example.dlse is None else to_device(np.ascontiguousarray(example.dlse), "contiguous")
    with zeros_for_sums(ready._plan) if case.kernel in UNSEEN else nullcontext():
        ready.backward(do, q, k, v, o, lse, dlse=dlse, **sink)
    if case.has_tangents:
        o_dot, lse_dot = ready.jvp(q, k, v, o, lse, q, k, v, **sink)
        ready.backward_jvp(do, q, k, v, o, lse, o_dot, lse_dot, q, k, v, dlse=dlse, **sink)
    if case.makes_lists:
        cuflash.attention(q, k, v, mask=mask, out=out, **case.options, **sink)
    cupy.cuda.get_current_stream().synchronize()


# Calls on caches: dtype, query heads, new rows, page size or None, and whether rows are stored in FP8. Caches have two
# key/value heads of head_dim 64, and 300 positions.
CACHES = (
    ("float16", 2, 1, None, False), ("float16", 8, 5, 16, False), ("bfloat16", 4, 20, 64, False),
    ("float32", 2, 3, 16, False), ("float16", 2, 1, 16, True), ("bfloat16", 4, 20, None, True),
    ("bfloat16", 4, 70, 16, False),
)  # fmt: skip
MASS_DTYPES = ("float16", "bfloat16", "float32")
_CACHE = {"num_kv_heads": 2, "head_dim": 64, "capacity": 300}


def specs_of_caches(device: DeviceSpec) -> set[KernelSpec]:
    """Return the KV-cache kernels that these calls launch."""
    specs = set()
    for dtype, heads, rows, _, has_8_bits in CACHES:
        specs |= {append_spec(as_dtype("dtype", dtype), is_quantized=has_8_bits), bounds_spec(as_dtype("dtype", dtype))}
        q, k = (cuflash.ShapeDtype((3, *shape, 64), dtype) for shape in ((heads, rows), (2, 300)))
        problem = Problem.of(q, k, k)
        if not decode_reasons(problem, device):
            spec = decode_spec(problem, device, is_quantized=has_8_bits)
            of_token = decode_spec(replace(problem, seqlen_q=1), device, is_quantized=has_8_bits)
            specs |= {spec, replace(spec, has_sink=True), replace(of_token, is_chosen=True)}
        elif not prefill_reasons(problem, device, "sm90"):
            spec, of_queries = prefill_spec(problem, device, "sm90"), intervals_spec(problem.dtype)
            specs |= {spec, of_queries, replace(spec, has_sink=True), replace(of_queries, has_sink=True)}
    return specs


def run_caches() -> int:
    """Append to caches and attend to them, with counts on the host and on the device; return the number of calls."""
    import cupy

    for dtype, heads, rows, page_size, has_8_bits in CACHES:
        pages = {} if page_size is None else {"page_size": page_size, "num_pages": 60}
        q_dtype = as_dtype("dtype", dtype)
        cache_dtype = as_dtype("dtype", "float8_e4m3fn") if has_8_bits else q_dtype
        if pages and not has_8_bits:
            pages["keeps_page_bounds"] = True
        cache = cuflash.KVCache(batch=3, dtype=cache_dtype, xp=cupy, **_CACHE, **pages)
        k, q = (cupy.full((3, *shape, 64), 1, q_dtype) for shape in ((2, 200), (heads, rows)))
        cache.append(k, k, counts=[200, 0, 130])
        if q_dtype.itemsize == 2:
            counts = [rows, 0, rows]
            cache.attention(q, counts=counts)
            lists = cupy.asarray(np.random.default_rng(0).integers(-1, 4, (2, rows, 3)))
            cache.attention(q, counts=counts, mask=masks.ChosenBlocks(lists, 64))
            cache.reserve([290, 90, 290])
            cache.append(k, k, counts=cupy.asarray(np.array([90, 90, 5], np.int32)))
            cache.attention(q, sink=cupy.zeros((heads,), np.float32))
        cache.check()
    return len(CACHES)


def specs_of_masses(device: DeviceSpec) -> set[KernelSpec]:
    """Return the block-mass kernels that these calls launch."""
    arrays = (cuflash.ShapeDtype((2, 90, 64), dtype) for dtype in MASS_DTYPES)
    return {mass_kernel(Request(Problem.of(x, x, x), device), 24) for x in arrays}


def run_masses() -> int:
    """Sum block masses under a mask, with short last blocks; return the number of calls."""
    import cupy

    for dtype in MASS_DTYPES:
        x = cupy.full((2, 90, 64), 1, as_dtype("dtype", dtype))
        cuflash.study.block_mass(x, x, block=(16, 24), causal=True)
    return len(MASS_DTYPES)


def specs_of_selectors() -> set[KernelSpec]:
    """Return the kernels of selectors for the dtypes of these calls."""
    dtypes = tuple(as_dtype("dtype", dtype) for dtype in MASS_DTYPES)
    of_all = every_selection_spec(dtypes) | every_page_spec(dtypes)
    return of_all | {spec for spec in every_query_spec(dtypes) if spec.head_dim == 64}


def run_selectors() -> int:
    """Choose blocks with every selector that has separate kernels; return the number of calls."""
    import cupy

    few = {"budget": cuflash.selectors.Budget(top_k=2)}
    of_blocks = {"block": 32, "causal": True}
    calls: dict[str, dict[str, Any]] = {
        **dict.fromkeys(("pooled", "antidiagonal", "nsa", "random"), few | of_blocks), "quest": few,
        "vertical_slash": of_blocks | dict.fromkeys(("vertical", "slash"), few["budget"]),
    }  # fmt: skip
    for dtype in MASS_DTYPES:
        x = cupy.full((2, 200, 64), 1, as_dtype("dtype", dtype))
        for name, options in calls.items():
            getattr(cuflash.selectors, name)(x, x, **options)
        for select in (cuflash.selectors.nsa, cuflash.selectors.pooled):
            select(x, x, **few, block=(1, 32), causal=True)
        cache = cuflash.KVCache(
            batch=2, num_kv_heads=1, head_dim=64, capacity=200, page_size=16, num_pages=26, dtype=x.dtype,
            keeps_page_bounds=True, xp=cupy,
        )  # fmt: skip
        cache.append(x[:, None], x[:, None])
        cuflash.selectors.quest(x[:, None, -1:], cache, **few)
    return (len(calls) + 3) * len(MASS_DTYPES)


def specs_of_results() -> set[KernelSpec]:
    """Return the kernels that merge and compare results, for the dtypes of these calls."""
    return every_result_spec(tuple(as_dtype("dtype", dtype) for dtype in MASS_DTYPES))


def run_results() -> int:
    """Merge three parts with shared rows, and measure the recall of a window; return the number of calls."""
    import cupy

    for dtype in MASS_DTYPES:
        x = cupy.full((2, 200, 60), 1, as_dtype("dtype", dtype))
        o, lse = cuflash.attention(x, x, x, return_lse=True)
        cuflash.merge([o] * 3, [lse] * 3)
        cuflash.study.recall(x, x, x, mask=masks.SlidingWindow(9, 0))
    return 2 * len(MASS_DTYPES)


# Calls on FP8 operands: head_dim, rows that share a scale, and further options.
QUANTIZED: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (64, 128, {"causal": True}), (128, 128, {"window": (70, 3)}),
    (64, 64, {"mask": masks.Documents(np.arange(300) // 90)}),
)  # fmt: skip


def specs_of_quantized(device: DeviceSpec) -> set[KernelSpec]:
    """Return the kernels that these calls launch, except those that build lists."""
    specs = set()
    for columns, block, _ in QUANTIZED:
        x = cuflash.ShapeDtype((2, 300, columns), "bfloat16")
        problem = replace(Problem.of(x, x, x), precision="fp8", rows_per_scale=RowsPerScale(block, block, block))
        specs |= {*Sm90Fp8().specs(Request(problem, device)).values(), quantize_spec(x.dtype, columns, block)}
        specs.add(transpose_spec(columns))
    return specs


def run_quantized() -> int:
    """Quantize operands and attend to them; return the number of calls."""
    import cupy

    for columns, block, options in QUANTIZED:
        x = cupy.full((2, 300, columns), 1, as_dtype("dtype", "bfloat16"))
        rotated = cuflash.quantize(x, block=block, rotate=cuflash.Rotation(columns))
        cuflash.attention(rotated, rotated, cuflash.quantize(x, block=block), **options)
    return len(QUANTIZED)


def specs_of_captured_sums() -> set[KernelSpec]:
    """Return the kernels that these calls launch in addition to those of every backward pass."""
    return {sums_spec(np.dtype(np.float32))}


def run_captured_sums() -> int:
    """Compute deterministic gradients of slopes, and of a bias that the batch shares; return the number of calls."""
    import cupy

    x = cupy.full((2, 2, 90, 32), 1, np.float32)
    bias, slopes = cupy.full((2, 90, 90), 1, np.float32), cupy.full(2, 1, np.float32)
    for options in ({"bias": bias, "wrt": "bias"}, {"score": cuflash.scores.alibi(slopes), "wrt": "slopes"}):
        cuflash.attention_vjp(x, x, x, deterministic=True, kernel="simt", **options)[1](x)
    return 2


@contextmanager
def zeros_for_sums(plan: KernelPlan) -> Iterator[None]:
    """Zero the sums of dQ before a kernel writes them or adds to them; leave other new arrays unchanged."""
    import cupy

    empty = cupy.empty
    sums = plan.kernels.backward.workspaces.get("dq_sum")

    def zeroed(shape: Any, dtype: Any) -> Any:
        array = empty(shape, dtype)
        if sums is not None and (shape, dtype) == (sums.shape, sums.dtype):
            array.fill(0)
        return array

    with patch.object(cupy, "empty", zeroed):
        yield


DONE = "cases done:"  # start of the child's last line, followed by the number of cases


def child(argument: str) -> None:
    """Run the requested cases, given as JSON, under a sanitizer."""
    import cupy

    request = json.loads(argument)
    cupy.cuda.set_allocator(None)
    cupy.cuda.set_pinned_memory_allocator(None)
    done = 0
    if request["control"]:
        run_case(control(request["control"]), leaves_k_unwritten=True)
        done += 1
    else:
        lengths = {name: request[name] for name in ("seqlen_q", "seqlen_kv")}
        part, num_parts = request["part"]
        for _, case in islice(cases(Config(families=tuple(request["families"]), **lengths)), part, None, num_parts):
            run_case(case)
            done += 1
        if part == 0 and "sm80" in request["families"]:
            done += run_caches()
        if part == 0 and "simt" in request["families"]:
            done += run_masses() + run_selectors() + run_results() + run_captured_sums()
        if part == 0 and "sm90" in request["families"]:
            done += run_quantized()
    print(DONE, done, flush=True)


# Sanitizers: the parent process


def sanitizer() -> str:
    """Return the path of compute-sanitizer, on PATH or in CUDA's folder."""
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes = [*map(Path, named), Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    places = [home / within for home in homes for within in ("bin", "compute-sanitizer")]
    path = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)]))
    if path is None:
        sys.exit(
            "gpu_proof --sections sanitizers needs compute-sanitizer, which is neither on PATH nor in CUDA's folder: "
            "install CUDA's package cuda-sanitizer, or name the folder in CUDA_HOME"
        )
    return path


def errors_in(output: str) -> int | None:
    """Return the sum of the error counts in a tool's last lines, one per process, or None if the tool itself failed."""
    matches = re.findall(r"ERROR SUMMARY: (\d+) errors?$|RACECHECK SUMMARY: (\d+) hazard", output, re.MULTILINE)
    return sum(int(errors or hazards) for errors, hazards in matches) if matches else None


def under(tool: str, name: str, request: dict[str, Any], timeout_s: int) -> Record:
    """Run a child process under a tool; return the counts of cases and errors, the seconds, and other failures."""
    paths = [*FOLDERS, str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    code = "import sys, gpu_proof; gpu_proof.child(sys.argv[1])"
    command = [tool, "--tool", name, *OPTIONS.get(name, ()), sys.executable, "-c", code, json.dumps(request)]
    begin, note = time.perf_counter(), ""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUFLASH_CHECK": str(int(name in WATCHED))}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, env=environment, start_new_session=True, **streams) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # kill the tool, and the process that it checks
            output, _ = process.communicate()
            note = f"stopped after {timeout_s} s"
    done = re.search(f"^{DONE} (\\d+)$", output, re.MULTILINE)
    errors = errors_in(output)
    if errors is None:
        note = note or "compute-sanitizer printed no summary"
    if done is None and not note:
        own = [line for line in output.splitlines() if line and not line.startswith("=========")]
        note = f"the process failed: {own[-1] if own else 'without a word'}"
    if errors or note:
        lines = [line for line in output.splitlines() if "Host Frame" not in line and line != "========= "]
        print("\n".join([*lines[:60], "...", *lines[-30:]]), file=sys.stderr)
    return {
        "calls": int(done[1]) if done else 0, "errors": errors, "seconds": time.perf_counter() - begin, "note": note,
    }  # fmt: skip


def run_sanitizers(config: Config, device: DeviceSpec) -> Iterator[Record]:
    """Yield a record for each tool and family, and one for each family of initcheck's control."""
    tool, runs = sanitizer(), families(config, device)
    version_text = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"[Vv]ersion (\S+)", version_text)
    constants = {"section": "sanitizers", "sanitizer": version[1] if version else "unknown"}
    lengths = {"seqlen_q": config.seqlen_q, "seqlen_kv": config.seqlen_kv}
    every = [case for _, case in cases(Config(families=tuple(runs)))] + [control(family) for family in runs]
    specs = {spec for case in every for spec in case.plan(device).specs.values()}
    specs |= {*LIST_SPECS.values(), *INTERVAL_SPECS.values(), UNIONS, *COLUMN_SPECS.values()}
    specs |= specs_of_caches(device) if "sm80" in runs else set()
    if "simt" in runs:
        specs |= specs_of_masses(device) | specs_of_selectors() | specs_of_results() | specs_of_captured_sums()
    specs |= specs_of_quantized(device) if "sm90" in runs else set()
    if set(config.tools) & set(WATCHED):
        specs |= {replace(spec, has_watchdog=True) for spec in specs if spec.family == "sm90"}
    nvrtc.precompile(specs, device.compute_capability)  # fills CuPy's cache, from which each child loads the kernels
    checks = [(name, family) for name in sorted(config.tools, key=SLOWEST_FIRST.index) for family in runs]
    if "initcheck" in config.tools:
        checks += [(CONTROL, family) for family in runs if family not in UNSEEN]

    def run_part(check: str, family: str, part: int, num_parts: int) -> Record:
        request = {"control": family if check == CONTROL else "", "families": [family], "part": (part, num_parts)}
        return under(tool, check.partition(",")[0], request | lengths, config.timeout_s)

    with ThreadPoolExecutor(config.jobs) as pool:
        futures = {}
        for check, family in checks:
            num_parts = 1 if check == CONTROL else config.parts
            parts = [pool.submit(run_part, check, family, part, num_parts) for part in range(num_parts)]
            futures[check, family] = parts
        for (check, family), parts in track(list(futures.items()), "sanitizers"):
            yield constants | {"check": check, "family": family} | in_sum([part.result() for part in parts])


def in_sum(parts: Sequence[Record]) -> Record:
    """Return the record of a tool and a family from those of its processes; errors are None if a tool failed."""
    errors = [part["errors"] for part in parts]
    return {
        "calls": sum(part["calls"] for part in parts), "errors": None if None in errors else sum(errors),
        "seconds": sum(part["seconds"] for part in parts), "note": next(filter(None, (x["note"] for x in parts)), ""),
    }  # fmt: skip


def run(config: Config) -> Iterator[Record]:
    """Yield the records of all sections, with the versions that they depend on."""
    if reason := why_no_gpu():
        sys.exit(f"gpu_proof runs kernels on a GPU: {reason}")
    device, versions = gpu.current_device(), gpu_versions()
    sections = {"repeats": run_repeats, "sanitizers": run_sanitizers}
    for section in config.sections:
        for record in sections[section](config, device):
            yield record | versions


def is_wrong(record: Record) -> bool:
    """Return whether a row shows a failure."""
    has_errors = record["errors"] is None or record["errors"] > 0
    return bool(record.get("note")) or has_errors != (record["check"] == CONTROL)


def table(records: Sequence[Record]) -> Table:
    """Return a table with a row for each record."""
    shown = Table(title="repeats: calls that differ; sanitizers: errors")
    columns = ("check", "family", "dtype", "head_dim", "mask", "calls", "errors", "seconds", "waves", "note")
    for column in columns:
        shown.add_column(column, justify="right" if column in ("head_dim", "calls", "errors", "seconds") else "left")
    for row in records:
        cells = (row.get(name, "") for name in columns)
        shown.add_row(*(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells))
    return shown


# Columns that distinguish the rows of the result.
ROW = ("gpu", "section", "check", "family", "dtype", "head_dim", "mask")

if __name__ == "__main__":
    if wrong := [record for record in main(Config, run, table, replacing=ROW) if is_wrong(record)]:
        sys.exit(f"{len(wrong)} rows are not as they should be, the first: {wrong[0]}")
