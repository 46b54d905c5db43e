"""What limits a kernel: memory, issued instructions, tensor cores, or too few warps?

    python -m experiments kernel_profile --publish
    python -m experiments kernel_profile --works quest,moba      # some of them

It needs an NVIDIA GPU, CuPy, and NVIDIA's profiler ncu with the permission to read counters. Each work is called twice
in a process of its own, and the launches of the second call are counted, with the level-2 cache emptied before each
launch and the clocks as they are. A row is the launch of a kernel.

Works: `quest` is Quest's choice of 1/16 of 65536 keys for one token and attention to it, as in `chosen_decode`;
`moba` and `nsa` choose 16 blocks for each of 16384 queries, as in `selection_speed`; `group4` is the backward pass of
attention to 16 random blocks of each of 16384 queries with groups of 4 heads, as in `chosen_speed`; `plain` are both
passes of causal attention to 16384 tokens, and `derivatives` a tangent and a double backward at 8192 tokens, all with
16 heads of 128 in bfloat16.

`us` is the launch's duration. `dram_pct`, `l2_pct`, `l1_pct` and `tensor_pct` are shares of the peak of memory, the
level-2 cache, the level-1 cache with shared memory, and tensor cores; `issue_pct` is the share of cycles in which a
scheduler issues an instruction; `warps_pct` is the share of a multiprocessor's warps that are active. `stall` is the
commonest reason for which a warp waits, with its share of the waiting.

Cost: Two minutes of a GPU.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import chosen_decode
import chosen_speed
import cuflash
import numpy as np
import selection_speed
from harness import Record, check_names, gpu_versions, machine, main, why_no_gpu
from profiler import Launch, profiled
from rich.table import Table

_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {
    reason: _STALL.format(reason)
    for reason in ("long_scoreboard", "short_scoreboard", "barrier", "mio_throttle", "lg_throttle", "membar",
                   "math_pipe_throttle", "wait", "branch_resolving", "no_instruction", "not_selected", "sleeping")
}  # fmt: skip
COLUMNS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "clock_mhz": ("sm__cycles_elapsed.avg.per_second", 1e-6),
    "mbytes": ("dram__bytes.sum", 1e-6),
    "dram_pct": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "l2_pct": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "l1_pct": ("l1tex__throughput.avg.pct_of_peak_sustained_active", 1),
    "tensor_pct": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "issue_pct": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1),
    "warps_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "registers": ("launch__registers_per_thread", 1),
    "grid": ("launch__grid_size", 1),
    "block": ("launch__block_size", 1),
}
METRICS = (*(name for name, _ in COLUMNS.values()), *STALLS.values())


def quest() -> Callable[[], Any]:
    """Choose 64 of 1024 pages for one token, and attend to them."""
    case = chosen_decode.Case(chosen_decode.Config(), 1, 65536, 16)
    return case.ways("group")[chosen_decode.BOTH][0]


def of_selection(name: str) -> Callable[[], Any]:
    """Return a selection of 16 blocks for each of 16384 queries of 64 heads in 4 groups."""
    q, k = (selection_speed.normal(count, 16384, 128) for count in (64, 4))
    return selection_speed.calls_per_query(q, k, 16)[name]


def group4() -> Callable[[], Any]:
    """Differentiate attention to 16 random blocks of each query, of 64 heads in 16 groups."""
    lists = chosen_speed.lists_of(16384, 16, 16, "random")
    arrays = tuple(selection_speed.normal(heads, 16384, 128) for heads in (64, 16, 16, 64))
    return dict(chosen_speed.calls_of(arrays, lists))["backward chosen"]


def plain() -> Callable[[], Any]:
    """Run both passes of causal attention."""
    q, k, v, do = (selection_speed.normal(16, 16384, 128) for _ in range(4))
    return lambda: cuflash.attention_vjp(q, k, v, causal=True)[1](do)


def derivatives() -> Callable[[], Any]:
    """Compute a tangent, and the gradient of gradients."""
    arrays = [selection_speed.normal(16, 8192, 128) for _ in range(7)]
    q, k, v, do = arrays[:4]

    def both() -> None:
        cuflash.attention_jvp(q, k, v, *arrays[4:])
        cuflash.attention_hvp(q, k, v, do, *arrays[4:])

    return both


WORKS: dict[str, Callable[[], Callable[[], Any]]] = {
    "quest": quest,
    "moba": lambda: of_selection("moba per query and group"),
    "nsa": lambda: of_selection("nsa per query, lse given"),
    "group4": group4,
    "plain": plain,
    "derivatives": derivatives,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The works to profile; the defaults are the published run."""

    works: tuple[str, ...] = tuple(WORKS)

    def __post_init__(self) -> None:
        check_names(self, {"works": tuple(WORKS)})


def call(work: str) -> None:
    """Call a work twice, the second time with the profiler on."""
    from cupy.cuda import Device, runtime

    run_once = WORKS[work]()
    run_once()
    Device().synchronize()
    runtime.profilerStart()
    run_once()
    Device().synchronize()
    runtime.profilerStop()


def record_of(work: str, number: int, launch: Launch) -> Record:
    """Return the row of a launch."""
    waits = {reason: launch.counters[name] for reason, name in STALLS.items()}
    worst = max(waits, key=waits.__getitem__)
    share = waits[worst] / (sum(waits.values()) or 1.0)
    row = {name: np.round(launch.counters[metric] * unit, 2) for name, (metric, unit) in COLUMNS.items()}
    return {"work": work, "launch": number, "kernel": launch.kernel, **row, "stall": worst, "stall_share": share}


def run(config: Config) -> Iterator[Record]:
    """Yield a record per launch of each work."""
    if reason := why_no_gpu():
        sys.exit(f"kernel_profile counts on a GPU: {reason}")
    options = ("--clock-control", "none", "--profile-from-start", "off")
    for work in config.works:
        try:
            launches = profiled("kernel_profile", f"call({work!r})", METRICS, ".", options)
        except RuntimeError as error:
            sys.exit(f"kernel_profile: {error}")
        for number, launch in enumerate(launches):
            yield record_of(work, number, launch) | machine() | gpu_versions()


def table(records: list[Record]) -> Table:
    """Tabulate the launches."""
    columns = ("work", "kernel", "us", "dram_pct", "l2_pct", "l1_pct", "tensor_pct", "issue_pct", "warps_pct", "stall")
    result = Table(*columns, title="Counters of kernels")
    for record in records:
        result.add_row(*(f"{x:.4g}" if isinstance(x := record[name], float) else str(x) for name in columns))
    return result


# Columns that distinguish the rows of the result.
ROW = ("gpu", "work", "launch")

if __name__ == "__main__":
    main(Config, run, table, replacing=ROW)
