"""Which tile is fastest on a device? Checks the choices of tiles in cuflash/planning/families/*.py.

    python -m experiments tile_sweep                                                      # the host
    python -m experiments tile_sweep --gpu                                                # a GPU with CuPy
    python -m experiments tile_sweep --gpu --families sm80 --passes backward --head-dims 64
    python -m experiments tile_sweep --gpu --families sm90                                # a Hopper GPU

Host part: both passes of the cpu executor, float32, for score tiles of every shape, either with tiles on separate
threads and BLAS on one thread, or with tiles one after another and BLAS on all threads; and NumPy's exp and exp2. GPU
part: every tile of a kernel that `candidates` yields, in bfloat16 on tensor cores and float32 on simt. All of them are
compiled; their number is printed first. A tile that spills more than `most_stack` bytes, or for which the compiler
reports an advisory (serialized products), is only recorded. The others are compiled again by CuPy, whose cache records
neither spills nor advisories, then checked (spot_check.py) and timed alternately: medians, with the level-2 cache
flushed before each call. For Hopper's kernels, the `widths` widest tiles of each height that fit registers and shared
memory are tried, and more stages for the chosen tile: at most 12 tiles. The whole pass is timed: a backward kernel
together with the other kernels of its pass, whose tiles stay the same. TFLOP/s count the paper's products, `chosen` is
the choice of `cuflash.plan`, and `note` the reason why a tile was not timed. Rows of the result that a run does not
measure are left unchanged.

Expect: tall tiles are fastest, with the most keys that still stream well through the cache; threads gain in proportion
to softmax's share of the work. On a GPU, the tiles with the most products per loaded element, if registers suffice.
Found:  threads are 1.2 to 1.4 times faster; the forward time hardly depends on the tile from 256 queries on, and the
backward pass slows down by a third once its two tiles of scores exceed the level-2 cache. 512 x 512 is best in both.
exp2 takes half the time of exp.

Cost: Minutes on two cores; --gpu an hour, most of it for compiling.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cuflash
import ml_dtypes
import numpy as np
from cuflash import masks
from cuflash.compiler import nvrtc
from cuflash.executors import gpu
from cuflash.planning.device import DeviceSpec
from cuflash.errors import CompileError
from cuflash.plans import Plan
from cuflash.planning.plan import KernelPlan
from cuflash.planning.spec import KernelSpec
from cuflash.planning.families import simt, sm80
from cuflash.planning.families.family import Request
from cuflash.planning.families.sm90_storage import ROWS
from harness import Record, check_names, gpu_versions, main, time_alternately, time_on_device, track, why_no_gpu
from rich.table import Table
from spot_check import SpotCheck
from workloads import draw, flops


class Tried(NamedTuple):
    """Candidates for the tiles of an sm90 kernel.

    Only the chosen tile is tried with more than the first number of stages.
    """

    blocks_q: tuple[int, ...]
    blocks_kv: tuple[int, ...]
    stages: tuple[int, ...]
    # returns the fraction of a consumer's registers that accumulators and operands need
    filled: Callable[[KernelSpec], float]


def filled_forward(spec: KernelSpec) -> float:
    """Return the fraction of a warpgroup's registers that S, P (half the registers of S) and O need."""
    registers = {1: 200 if spec.min_blocks > 1 else 255, 2: 224, 3: 160}[spec.block_q // ROWS]
    return (spec.block_kv * 3 / 4 + spec.value_dim / 2) / registers


SM90 = {
    "forward": Tried((64, 128, 192), tuple(range(256, 63, -16)), (2, 3, 4), filled_forward),
    "backward": Tried(
        (64, 128), (128,), (2, 3, 4), lambda spec: (spec.block_q + (spec.head_dim + spec.value_dim) / 2) / 240
    ),
    "backward_wide": Tried(
        (64,), (96, 80, 64), (2,), lambda spec: (32 + spec.block_kv * (spec.head_dim + spec.value_dim) / 256) / 240
    ),
}

DTYPES = {"sm90": ml_dtypes.bfloat16, "sm80": ml_dtypes.bfloat16, "simt": np.float32}
HEAD_DIMS = {"sm90": (64, 128, 256), "sm80": (64, 128, 256), "simt": (64, 128)}
# The kernels whose tiles are swept, by family; for all but the first, the backward pass is timed.
PASSES = {
    "sm90": tuple(SM90),
    "sm80": ("forward", "backward", "backward_rows"),
    "simt": ("forward", "backward", "backward_rows", "backward_columns"),
}
SIMT_ENTRIES = {
    entry.name: entry for entry in (simt.FORWARD, simt.BACKWARD, simt.BACKWARD_ROWS, simt.BACKWARD_COLUMNS)
}
EVERY_PASS = tuple(dict.fromkeys(itertools.chain(*PASSES.values())))
MASKS = ("full", "causal")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shapes of the published run."""

    num_heads: int = 2
    seqlen: int = 4096
    head_dim: int = 64
    blocks_q: tuple[int, ...] = (128, 256, 512)
    blocks_kv: tuple[int, ...] = (512, 1024, 4096)
    repeats: int = 3
    gpu: bool = False
    families: tuple[str, ...] = tuple(DTYPES)
    passes: tuple[str, ...] = EVERY_PASS
    head_dims: tuple[int, ...] = HEAD_DIMS["sm80"]
    masks: tuple[str, ...] = MASKS
    gpu_seqlen: int = 4096
    sm90_tokens: int = 16384
    sm80_tokens: int = 16384
    simt_tokens: int = 8192
    gpu_hidden: int = 2048
    gpu_repeats: int = 9
    most_stack: int = 64
    widths: int = 3

    def tokens(self, family: str) -> int:
        return {"sm90": self.sm90_tokens, "sm80": self.sm80_tokens, "simt": self.simt_tokens}[family]

    def __post_init__(self) -> None:
        check_names(self, {"families": DTYPES, "passes": EVERY_PASS, "masks": MASKS})
        is_cut = any(self.tokens(family) % self.gpu_seqlen for family in DTYPES)
        if is_cut or any(self.gpu_hidden % dim for dim in self.head_dims):
            raise ValueError("gpu_seqlen must divide the tokens of each family, and head_dims gpu_hidden")


# The host


def at_tile(ready: Plan, tile: tuple[int, int], is_threaded: bool) -> Plan:
    """Return the plan of the same call with another tile."""
    plan = ready._plan
    device = plan.device if is_threaded else replace(plan.device, num_processors=1)
    work = replace(plan.work, block_q=tile[0], block_kv=tile[1])
    tiling = replace(plan.tiling, block_q=tile[0], block_kv=tile[1], work=work, device=device)
    return Plan(replace(plan, tiling=tiling, work=work, device=device))


def exponentials(size: int = 1 << 20) -> dict[str, Callable[[], object]]:
    """Return calls of exp and exp2 on a float32 array that fits into the cache."""
    x = -np.random.default_rng(0).random(size, np.float32)
    y = np.empty_like(x)
    return {"exp": lambda: np.exp(x, out=y), "exp2": lambda: np.exp2(x, out=y)}


def run_host(config: Config) -> list[Record]:
    """Return one record for each tile, pass and number of threads, and two for the exponentials."""
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, config.num_heads, config.seqlen, config.head_dim), np.float32)
    ready = cuflash.plan(q, k, v)
    expected, lse = ready.forward(q, k, v)
    bound = cuflash.error_bound(q[:, :64], k, v).o
    records = [
        {"way": name, "ms": timing.median_ms} for name, timing in time_alternately(exponentials(), repeats=50).items()
    ]
    shapes = [(block_q, block_kv) for block_q in config.blocks_q for block_kv in config.blocks_kv]
    for is_threaded in (True, False):
        for tile in track(shapes, "tiles on threads" if is_threaded else "BLAS on threads"):
            swept = at_tile(ready, tile, is_threaded)
            if not (np.abs(swept.forward(q, k, v)[0] - expected)[:, :64] <= 2 * bound).all():
                raise AssertionError(f"forward at {tile} is outside its bound")
            calls: dict[str, Callable[[], object]] = {
                "forward": lambda swept=swept: swept.forward(q, k, v),
                "backward": lambda swept=swept: swept.backward(do, q, k, v, expected, lse),
            }
            for way, timing in time_alternately(calls, repeats=config.repeats).items():
                row: Record = {"way": way, "threads": "tiles" if is_threaded else "BLAS"}
                row |= {"block_q": tile[0], "block_kv": tile[1]}
                records.append(row | {"seqlen": config.seqlen, "ms": timing.median_ms, "spread_ms": timing.spread_ms})
    return records


# A GPU: the tiles that are worth compiling


def accumulator_words(spec: KernelSpec) -> float:
    """Return the number of registers per thread for scores, their gradients and accumulators."""
    if spec.family == "simt":
        return simt.accumulator_words(spec)
    queries, keys = spec.block_q, spec.block_kv
    elements = {
        "forward": queries * (keys + spec.value_dim),
        "backward": 2 * queries * keys + keys * (spec.head_dim + spec.value_dim),
        "backward_rows": queries * (2 * keys + spec.head_dim),
    }[spec.entry.name]
    return elements / spec.num_threads


def fills_registers(spec: KernelSpec) -> bool:
    """Return whether accumulators take 1/4 to 3/4 of a thread's registers; for simt, at least 1/16.

    With more, some kernels spill, because operands and addresses need the rest. With fewer, there are too few products
    per loaded element; but simt keeps float32 operands in shared memory, which is small on some chips.
    """
    registers = min(256, (1 << 16) // (spec.num_threads * spec.min_blocks))
    least = registers / (16 if spec.family == "simt" else 4)
    return least <= accumulator_words(spec) <= 3 / 4 * registers


def sm80_tiles_of(base: KernelSpec) -> Iterator[KernelSpec]:
    """Yield tiles at most twice as long as wide that warps share evenly, and small square tiles for short blocks."""
    sides, threads_at_once = (16, 32, 64, 128, 256), (256, 384) if base.entry.name == "forward" else (256,)
    stages = (1,) if base.entry.name == "forward" else (1, 2)
    for block_q, block_kv, num_warps, num_stages in itertools.product(sides, sides, (1, 2, 4, 8), stages):
        shorter, longer = sorted((block_q, block_kv))
        if longer > max(16, 2 * (shorter - shorter % 32)):
            continue
        for min_blocks in dict.fromkeys(max(1, threads // (32 * num_warps)) for threads in threads_at_once):
            yield replace(
                base, block_q=block_q, block_kv=block_kv, num_warps=num_warps, num_stages=num_stages,
                min_blocks=min_blocks,
            )  # fmt: skip


def sm90_tiles_of(base: KernelSpec, device: DeviceSpec, widths: int) -> Iterator[KernelSpec]:
    """Yield the widest tiles of each height that fit, two blocks per multiprocessor if possible, and more stages."""
    tried = SM90[base.entry.name]
    for block_q in tried.blocks_q:
        shape = replace(base, block_q=block_q, num_stages=tried.stages[0])
        # registers move between warpgroups; with another number of warps the kernel would hang
        if base.entry.name == "forward":
            shape = replace(shape, num_warps=4 * (1 + block_q // ROWS))
        for min_blocks in (2, 1) if base.entry.name == "forward" and block_q == ROWS else (1,):
            every = (replace(shape, block_kv=block_kv, min_blocks=min_blocks) for block_kv in tried.blocks_kv)
            fitting = [spec for spec in every if finds_room(spec, device)]
            yield from fitting[:widths]
            if fitting:
                break
    yield from (replace(base, num_stages=stages) for stages in tried.stages)


def finds_room(spec: KernelSpec, device: DeviceSpec) -> bool:
    """Return whether registers may suffice, and shared memory does, for the required blocks of an sm90 kernel."""
    room = (device.tile_memory_bytes + 1024) // spec.min_blocks - 1024
    fits = SM90[spec.entry.name].filled(spec) <= 7 / 8 and spec.shared_bytes <= room
    return fits and is_shared_evenly(spec)


def is_shared_evenly(spec: KernelSpec) -> bool:
    """Return whether all threads of a block have equal shares of all products."""
    # A warpgroup computes 64 rows of dQ or, if the tile has only 64 rows, half of the columns in full panels.
    if spec.family == "sm90":
        return spec.entry.name != "backward" or spec.block_q * spec.head_dim % (2 * 64 * ROWS) == 0
    if spec.family == "simt":
        rows, step = simt.rows_and_step(spec)
        return rows % 16 == 0 and (spec.entry.name != "backward" or step % 16 == 0)
    if spec.entry.name != "backward":
        return spec.block_q % (16 * spec.num_warps) == 0
    products = [(spec.block_q, spec.head_dim), (spec.block_kv, spec.head_dim), (spec.block_kv, spec.value_dim)]
    if max(spec.head_dim, spec.value_dim) <= 128:
        products.append((spec.block_q, spec.block_kv))
    return all(sm80.can_partition(rows, columns, spec.num_warps) for rows, columns in products)


def candidates(base: KernelSpec, device: DeviceSpec, widths: int = Config.widths) -> list[KernelSpec]:
    """Return the kernel with every legal tile that is worth timing."""
    if base.family == "sm90":
        specs = dict.fromkeys(sm90_tiles_of(base, device, widths))
        return [spec for spec in specs if finds_room(spec, device)]
    sides = (8, 16, 32, 64, 128)
    every: Iterable[KernelSpec] = sm80_tiles_of(base)
    if base.family == "simt":
        every = (replace(base, block_q=q, block_kv=kv) for q, kv in itertools.product(sides, sides))
    return [
        spec
        for spec in every
        if is_shared_evenly(spec)
        and spec.shared_bytes <= device.tile_memory_bytes
        and fills_registers(spec)
    ]


# A GPU: compile, check, time


def kernel_of(plan: KernelPlan, entry: str) -> KernelSpec:
    """Return the kernel of an entry in the plan, or the kernel that the simt family could use."""
    return plan.specs.get(entry) or replace(plan.specs["forward"], entry=SIMT_ENTRIES[entry])


def with_specs(plan: KernelPlan, specs: dict[str, KernelSpec]) -> KernelPlan:
    """Return the plan with other kernels for the same entries."""
    assert plan.family is not None and plan.kernels is not None
    choose, family = plan.family.specs, type(plan.family)()
    setattr(family, "specs", lambda *args, **options: choose(*args, **options) | specs)
    request = Request.over(plan.problem, plan.device, plan.work, plan.kernels.is_repeatable)
    kernels = family.launches(request, plan.work)
    return replace(plan, kernels=kernels)


def at_kernel(plan: KernelPlan, spec: KernelSpec) -> KernelPlan:
    """Return the plan with another tile for a kernel; kernels that must share its tile size change with it."""
    specs = {spec.entry.name: spec}
    if spec.name == "sm80_backward":
        alike = (plan.specs[entry] for entry in ("backward_statistics", "convert_dq"))
        specs |= {each.entry.name: replace(spec, entry=each.entry) for each in alike}
    elif spec.family == "sm90" and spec.entry.name != "forward":
        tile = {"block_q": spec.block_q, "block_kv": spec.block_kv}
        specs |= {entry: replace(plan.specs[entry], **tile) for entry in ("backward_statistics", "convert_dq")}
    elif spec.name == "simt_backward":  # plans with few columns do not use this kernel
        specs["backward_statistics"] = replace(spec, entry=simt.BACKWARD_STATISTICS, block_q=64, block_kv=8)
    return with_specs(plan, specs)


def base_plan(q: Any, k: Any, v: Any, family: str, entry: str, mask: str, **options: Any) -> KernelPlan:
    """Return the library's plan for arrays or shapes; its kernel is the base of the sweep."""
    options = {"executor": "gpu", "deterministic": entry in ("backward_rows", "backward_columns")} | options
    return cuflash.plan(q, k, v, causal=mask == "causal", kernel=family, **options)._plan


def cells(config: Config, device: DeviceSpec) -> list[tuple[str, int]]:
    """Return the families and values of head_dim of a run."""
    pairs = itertools.product(config.families, config.head_dims)
    is_hopper = device.compute_capability == (9, 0)
    return [(family, dim) for family, dim in pairs if dim in HEAD_DIMS[family] and (family != "sm90" or is_hopper)]


def shape_of(config: Config, family: str, head_dim: int) -> tuple[int, int, int, int]:
    return config.tokens(family) // config.gpu_seqlen, config.gpu_hidden // head_dim, config.gpu_seqlen, head_dim


def plans_of(config: Config, family: str, head_dim: int, **options: Any) -> dict[tuple[str, str], KernelPlan]:
    """Return plans by kernel and mask, without kernels that the family would replace by a fall-back."""
    x = cuflash.ShapeDtype(shape_of(config, family, head_dim), np.dtype(DTYPES[family]))
    plans = {}
    for entry, mask in itertools.product((name for name in PASSES[family] if name in config.passes), config.masks):
        plan = base_plan(x, x, x, family, entry, mask, **options)
        owner = plan.specs[entry].family if entry in plan.specs else "simt"
        if owner == family:
            plans[entry, mask] = plan
    return plans


def compiled(specs: Sequence[KernelSpec], architecture: str) -> dict[KernelSpec, nvrtc.Compiled | CompileError]:
    """Compile kernels on one thread per core, and return the compiler's reports."""

    def tried(spec: KernelSpec) -> nvrtc.Compiled | CompileError:
        try:
            return nvrtc.cubin(spec, architecture)
        except CompileError as error:  # registers do not suffice for a single product
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(specs, pool.map(tried, specs), strict=True))


def fault_of(outcome: nvrtc.Compiled | CompileError, most_stack: int) -> str:
    """Return the reason why a kernel is not worth timing, or an empty string."""
    if isinstance(outcome, CompileError):
        return f"does not compile: {outcome.log.splitlines()[0]}"
    if outcome.advisories:
        return outcome.advisories[0].strip()
    stack = outcome.resources.stack_bytes
    return f"a thread keeps {stack} bytes out of registers" if stack > most_stack else ""


def run_gpu(config: Config) -> Iterator[Record]:
    """Yield one record per kernel, head_dim, mask and tile, with the versions that GPU measurements depend on."""
    if reason := why_no_gpu():
        sys.exit(f"tile_sweep --gpu times kernels on a GPU: {reason}")
    import cupy

    device, constants = gpu.current_device(), gpu_versions()
    plans = {cell: cell_plans for cell in cells(config, device) if (cell_plans := plans_of(config, *cell))}
    if not plans:
        sys.exit(f"tile_sweep --gpu has nothing to time: {device.name} has none of these kernels at these head_dims")
    swept: dict[tuple[str, int], dict[str, list[KernelSpec]]] = {
        cell: {entry: candidates(kernel_of(plan, entry), device, config.widths) for (entry, _), plan in of_cell.items()}
        for cell, of_cell in plans.items()
    }
    counts = {cell: sum(map(len, entries.values())) for cell, entries in swept.items()}
    print(f"{sum(counts.values())} tiles to compile, and most of them again for CuPy:", counts, file=sys.stderr)
    for cell in track(list(plans), "families and dims"):
        family, head_dim = cell
        arrays = draw(*shape_of(config, family, head_dim), dtype=DTYPES[family])
        every = [spec for entry in swept[cell].values() for spec in entry]
        outcomes = compiled(every, nvrtc.architecture(every[0], device.compute_capability))
        good = [spec for spec in every if not fault_of(outcomes[spec], config.most_stack)]
        used = {
            each
            for (entry, _), plan in plans[cell].items()
            for spec in good
            if spec.entry.name == entry
            for each in at_kernel(plan, spec).specs.values()
        }
        nvrtc.precompile(used, device.compute_capability)
        for mask in config.masks:
            check = SpotCheck.of(*arrays[:3], masks.Causal() if mask == "causal" else None)
            for entry, tried in swept[cell].items():
                for record in sweep(plans[cell][entry, mask], mask, tried, outcomes, arrays, check, config):
                    yield record | constants
        cupy.get_default_memory_pool().free_all_blocks()


def sweep(
    plan: KernelPlan,
    mask: str,
    swept: Sequence[KernelSpec],
    outcomes: Mapping[KernelSpec, nvrtc.Compiled | CompileError],
    arrays: Sequence[Any],
    check: SpotCheck,
    config: Config,
) -> list[Record]:
    """Check and time a kernel with each tile."""
    import cupy

    q, k, v, do = arrays
    o, lse = Plan(plan, "gpu").forward(q, k, v)
    checked_do = cupy.asarray(check.do)
    way = "forward" if swept[0].entry.name == "forward" else "backward"
    notes, calls = dict[KernelSpec, str](), dict[str, Callable[[], object]]()
    for spec in swept:
        if fault := fault_of(outcomes[spec], config.most_stack):
            notes[spec] = f"not timed: {fault}"
            continue
        ready = Plan(at_kernel(plan, spec), "gpu")
        names = ("o", "lse") if way == "forward" else ("dq", "dk", "dv")
        results = ready.forward(q, k, v) if way == "forward" else ready.backward(checked_do, q, k, v, o, lse)
        share = check.share(**dict(zip(names, results, strict=True)))
        if not share <= 1:
            notes[spec] = f"wrong: {share:.3g} times the bound on {', '.join(names)}"
            continue
        calls[str(spec)] = (
            (lambda ready=ready: ready.forward(q, k, v))
            if way == "forward"
            else (lambda ready=ready: ready.backward(do, q, k, v, o, lse))
        )
    times = time_on_device(calls, repeats=config.gpu_repeats, warmup=1)
    batch, num_heads, seqlen, head_dim = q.shape
    total = flops(way, mask, seqlen=seqlen, batch=batch, num_heads=num_heads, head_dim=head_dim)
    records = []
    for spec in swept:
        timing, resources = times.get(str(spec)), getattr(outcomes[spec], "resources", None)
        row: Record = {"pass": spec.entry.name, "family": spec.family, "dtype": spec.dtype.name, "head_dim": head_dim}
        row |= {"mask": mask, "seqlen": seqlen, "batch": batch, "heads": num_heads, "tile": name_of(spec)}
        row |= {"registers": resources and resources.registers, "stack_bytes": resources and resources.stack_bytes}
        row |= {"shared_bytes": spec.shared_bytes, "ms": timing and timing.median_ms}
        row |= {"spread_ms": timing and timing.spread_ms, "tflops": timing and total / timing.median_ms / 1e9}
        records.append(row | {"chosen": spec == plan.specs.get(spec.entry.name), "note": notes.get(spec, "")})
    return records


def name_of(spec: KernelSpec) -> str:
    """Name a tile: queries x keys, warps, minimum number of blocks per multiprocessor, stages."""
    return f"{spec.block_q}x{spec.block_kv} w{spec.num_warps} b{spec.min_blocks} s{spec.num_stages}"


# Summary of the rows


def run(config: Config) -> Iterable[Record]:
    """Run the part for the host, or the part for a GPU."""
    return run_gpu(config) if config.gpu else run_host(config)


def gpu_table(records: Sequence[Record]) -> Table:
    """Tabulate the chosen tile and the best one, for each kernel, head_dim and mask."""
    shown = Table(title="kernels by tile: queries x keys, warps, blocks a multiprocessor, stages")
    for column in ("pass", "family", "head_dim", "mask", "chosen", "TFLOP/s", "best", "TFLOP/s", "timed", "not timed"):
        shown.add_column(column, justify="left" if column in ("pass", "family", "mask", "chosen", "best") else "right")
    names = ("pass", "family", "head_dim", "mask")
    for case in dict.fromkeys(tuple(row[name] for name in names) for row in records):
        rows = [row for row in records if tuple(row[name] for name in names) == case]
        timed = sorted((row for row in rows if row["ms"]), key=lambda row: row["ms"])
        pairs = [next((row for row in timed if row["chosen"]), None), next(iter(timed), None)]
        cells = ((row["tile"], f"{row['tflops']:.1f}") if row else ("", "") for row in pairs)
        shown.add_row(*map(str, case), *itertools.chain(*cells), str(len(timed)), str(len(rows) - len(timed)))
    return shown


def table(records: list[Record]) -> Table:
    """Tabulate milliseconds by tile; on a GPU, the chosen tile and the fastest one."""
    if records and "pass" in records[0]:
        return gpu_table(records)
    shown = Table(title="cpu executor by tile, ms")
    for column in ("way", "threads", "block_q", "block_kv", "ms"):
        shown.add_column(column, justify="left" if column in ("way", "threads") else "right")
    for row in records:
        texts = (str(row.get(name, "")) for name in ("way", "threads", "block_q", "block_kv"))
        shown.add_row(*texts, f"{row['ms']:.2f}")
    return shown


# Columns that distinguish the rows of a GPU run.
GPU_ROW = ("gpu", "pass", "family", "dtype", "head_dim", "mask", "seqlen", "batch", "heads", "tile")

if __name__ == "__main__":
    records = main(
        Config, run, table, replacing=lambda config: GPU_ROW if config.gpu else (),
        name=lambda config: "tile_sweep_gpu" if config.gpu else "tile_sweep",
    )  # fmt: skip
    if any(row.get("note", "").startswith("wrong") for row in records):
        sys.exit("a tile's results were wrong, and it was not timed")
