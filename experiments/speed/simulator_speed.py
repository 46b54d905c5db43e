"""How long does a kernel take on the simulator, and does a correct kernel ever get a false report?

    python -m experiments simulator_speed        # needs g++

The build starts without a cache, for runtime and kernel, in a separate folder; the time of a call is the median over
forward calls. Schedules are random: any order of threads; copies that complete early, late or at random moments;
shuffled lanes; poisoned memory.

Expect: seconds to build, tens of milliseconds to run, no report, and the same bits for every schedule.
Found:  3.7 s to build, 24 ms forward and 47 ms backward at 200 tokens. On the same machine, it was 3.1 to 3.8 s and 20
to 23 ms when a fixed Python loop took 0.9 s, and 4.0 to 6.4 s and 21 to 43 ms when that loop took longer
(test_times.log at commit b648872e). 2,000 schedules, no report, the same bits.

Cost: Minutes on two cores.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import cuflash
import numpy as np
from cuflash import sim
from cuflash.executors.launch import run as run_pass
from cuflash.executors.sim import Simulator
from cuflash.compiler.source import source
from harness import Record, main, time_alternately, track
from rich.table import Table

COPIES = ("eager", "late", "random")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The timed shape (heads, seqlen, head_dim), and the number of schedules for a small problem."""

    num_heads: int = 2
    seqlen: int = 200
    head_dim: int = 64
    schedules: int = 2000
    repeats: int = 9

    def __post_init__(self) -> None:
        if min(self.num_heads, self.seqlen, self.head_dim, self.schedules, self.repeats) < 1:
            raise ValueError("heads, length, dim, schedules and repeats must be positive")


def draw(num_heads: int, seqlen: int, head_dim: int) -> list[np.ndarray]:
    """Draw q, k, v and do of shape (1, num_heads, seqlen, head_dim) from the normal distribution, float32."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, num_heads, seqlen, head_dim), np.float32) for _ in range(4)]


def run_build(config: Config) -> Record:
    """Time building the runtime and the forward kernel from scratch, in seconds."""
    q, k, v, _ = draw(config.num_heads, config.seqlen, config.head_dim)
    spec = cuflash.plan(q, k, v, causal=True, executor="sim")._plan.specs["forward"]
    folder = sim.compiler.cache_directory
    with tempfile.TemporaryDirectory() as empty:
        sim.compiler.cache_directory = lambda: Path(empty)
        try:
            begin = time.perf_counter()
            sim.build(source(spec, host=True), spec.name)
            seconds = time.perf_counter() - begin
        finally:
            sim.compiler.cache_directory = folder
    return {"measure": "build from cold", "kernel": spec.name, "ms": 1e3 * seconds}


def run_calls(config: Config) -> list[Record]:
    """Time both passes with a causal mask."""
    q, k, v, do = draw(config.num_heads, config.seqlen, config.head_dim)
    plan = cuflash.plan(q, k, v, causal=True, executor="sim")
    o, lse = plan.forward(q, k, v)
    bound = cuflash.error_bound(q, k, v, mask=cuflash.masks.Causal())
    mask = np.tril(np.ones((config.seqlen, config.seqlen), bool))
    if not (np.abs(o - cuflash.reference.attention(q, k, v, mask=mask)[0]) <= bound.o).all():
        raise AssertionError("the forward to be timed is wrong")
    calls = {"forward": lambda: plan.forward(q, k, v), "backward": lambda: plan.backward(do, q, k, v, o, lse)}
    times = time_alternately(calls, repeats=config.repeats)
    shape = {"num_heads": config.num_heads, "seqlen": config.seqlen, "head_dim": config.head_dim}
    return [
        {"measure": name, "kernel": "simt", **shape, "ms": timing.median_ms, "spread_ms": timing.spread_ms}
        for name, timing in times.items()
    ]


def run_schedules(config: Config) -> Record:
    """Run both passes with random schedules; count reports, and results with different bits."""
    q, k, v, do = draw(1, 24, 16)
    plan = cuflash.plan(q, k, v, causal=True, executor="sim")._plan
    first, others, reports = None, 0, 0
    for seed in track(range(config.schedules), "schedules"):
        schedule = sim.Schedule(seed=seed, order="random", copies=COPIES[seed % 3], shuffle_lanes=True)
        machine = Simulator(schedule=schedule)
        o, lse = np.full_like(q, np.nan), np.full(q.shape[:-1], np.nan, np.float32)
        dq, dk, dv = (np.full_like(x, np.nan) for x in (q, k, v))
        try:
            arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
            run_pass(plan, plan.kernels.forward, machine, arrays)
            run_pass(plan, plan.kernels.backward, machine, arrays | {"do": do, "dq": dq, "dk": dk, "dv": dv})
        except sim.SimulationError:
            reports += 1
            continue
        bits = b"".join(x.tobytes() for x in (o, lse, dq, dk, dv))
        first = first or bits
        others += bits != first
    counts = {"runs": config.schedules, "reports": reports, "other_bits": others}
    return {"measure": "random schedules", "kernel": "simt", **counts}


def run(config: Config) -> list[Record]:
    """Return one record for every measurement."""
    return [run_build(config), *run_calls(config), run_schedules(config)]


def table(records: list[Record]) -> Table:
    """Tabulate the measurements."""
    result = Table(title="the simulator")
    columns = ("measure", "kernel", "seqlen", "head_dim", "ms", "spread_ms", "runs", "reports", "other_bits")
    for column in columns:
        result.add_column(column)
    for row in records:
        cells = (row.get(name, "") for name in columns)
        result.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    return result


if __name__ == "__main__":
    main(Config, run, table)
