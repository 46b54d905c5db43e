"""How near do drawn examples come to their error bounds? A ledger that accumulates over runs.

    make soak SECONDS=3600                                           # the cpu executor, into the committed ledger
    python -m experiments soak --seconds 600 --executors cpu,sim     # into build/results/soak.csv
    python -m experiments soak --executors gpu --processes 8 --seconds 300

Draws examples from `cuflash.testing.structures`: lengths that are not multiples of a tile, masks of every kind, strided
views, scales up to 1e4, and, with probability 1/4 each, a score function, a sink, dropout, or none of these. Runs both
passes and divides the error of each result by its bound; Hypothesis steers the later examples of a batch towards larger
ratios. On the simulator and on a GPU the kernel families take turns; `auto` replaces a family that refuses an example.

A row of the ledger stands for an executor, a device, a dtype, a family and a feature. It has the number of examples,
how many of them exceeded a bound, the largest ratio for each result, and the example with the largest of all ratios. An
example counts once in the row of each of its features, including the kind of its mask and each kernel that it used.
`batches` counts the seeds used, so that a run continues with examples that no earlier run has drawn. Rows are written
after each batch.

Expect: no example exceeds its bounds; exit status 0, otherwise 1.
Found:  none exceeds them; the largest ratio is 0.67 (one rounding of a 16-bit result, divided by the margin of 1.5).

Cost: 20 ms of a core per example on the cpu executor, a second on the simulator.
"""

import functools
import math
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cuflash
import hypothesis
import numpy as np
from cuflash import UnsupportedProblem, masks
from cuflash.testing import assertions, strategies
from harness import Record, machine, parse_config, read_csv, why_no_gpu, write_csv
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from sim_against_gpu import masked, to_device

RESULTS = ("o", "lse", "dq", "dk", "dv", "captured", "dsink")
DTYPES = ("float16", "bfloat16", "float32", "float64")
EXECUTORS = ("cpu", "sim", "gpu")
FAMILIES = ("auto", "simt", "sm80", "sm90")
KEY = ("executor", "device", "dtype", "family", "feature")
EVERY = "any"  # feature of the row that counts all examples of a dtype and family


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a run; the defaults take five minutes."""

    seconds: float = field(default=300.0, metadata={"help": "when to stop; batches that have begun are finished"})
    executors: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = DTYPES
    size: int = field(default=200, metadata={"help": "examples of a batch; a tenth of it on the simulator"})
    processes: int = 2

    def __post_init__(self) -> None:
        if min(self.seconds, self.size, self.processes) <= 0:
            raise ValueError("seconds, size and processes must be positive")
        for names, known in ((self.executors, EXECUTORS), (self.dtypes, DTYPES)):
            if unknown := set(names) - {*known}:
                raise ValueError(f"unknown {', '.join(sorted(unknown))}; choose from {', '.join(known)}")


class Batch(NamedTuple):
    """Examples that one process draws from one seed."""

    executor: str
    dtype: str
    number: int
    size: int


def structures(batch: Batch) -> st.SearchStrategy[strategies.Structure]:
    """Return a strategy for the examples that an executor can run in a reasonable time."""
    room: dict[str, Any] = {}
    if batch.executor == "sim":
        room = {"widest": 32, "most_scores": 1 << 13, "most_rows": 400}
    small = room or {"widest": 16, "most_scores": 1 << 8, "longest": 40}  # the oracle evaluates score functions slowly
    drawn = functools.partial(strategies.structures, dtypes=(batch.dtype,))
    return st.one_of(
        drawn(**room), drawn(**small, has_score=True), drawn(**room, has_sink=True), drawn(**room, has_dropout=True)
    )


class Call(NamedTuple):
    """Results of a call, the family that the call requested, and the kernels that it launched."""

    results: dict[str, Any]
    family: str
    kernels: tuple[str, ...]


def call(structure: strategies.Structure, executor: str) -> Call:
    """Run both passes with the family selected in rotation, or with the default family if that one refuses."""
    family = "auto" if executor == "cpu" else FAMILIES[structure.seed % len(FAMILIES)]
    example = structure.example()
    q, k, v, do, dlse, sink = (getattr(example, name) for name in ("q", "k", "v", "do", "dlse", "sink"))
    mask, score = example.mask, example.score
    if executor == "gpu":
        q, k, v, do = (to_device(x, layout) for x, layout in zip((q, k, v, do), structure.layouts, strict=False))
        dlse, sink = (None if x is None else to_device(x, "contiguous") for x in (dlse, sink))
        if "Documents" in repr(mask):  # a device cannot know whether ids are sorted
            mask = cuflash.BlockIndex.from_mask(mask, block=32, **structure.mask_shape._asdict())
        else:
            mask = masked(mask, executor)
        if score is not None:
            score = cuflash.scores.Score(
                structure.score, **{name: to_device(x, "contiguous") for name, x in score.arrays.items()}
            )
    wrt = (*example.wrt, *(("sink",) if sink is not None else ()))
    options = {"mask": mask, "scale": example.scale, "score": score, "sink": sink, "dropout": example.dropout}
    options |= {"wrt": wrt, "executor": executor, "deterministic": bool(structure.seed // 8 % 2)}
    for kernel in dict.fromkeys((family, "auto")):
        try:
            (o, lse), vjp = cuflash.attention_vjp(q, k, v, **options, kernel=kernel, return_lse=True)
            gradients = vjp(do, dlse)
            break
        except UnsupportedProblem:
            if kernel == "auto":
                raise
    named = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients), strict=True))
    named |= {"captured": {name: gradients[name] for name in example.wrt}} if example.wrt else {}
    named |= {"dsink": gradients["sink"]} if sink is not None else {}
    entries: tuple[str, ...] = ()
    if executor != "cpu":
        plan = cuflash.plan(q, k, v, **options, kernel=kernel)
        entries = tuple(dict.fromkeys(spec.name for spec in plan._plan.specs.values()))
    return Call({name: _on_host(x) for name, x in named.items()}, kernel, entries)


def _on_host(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {name: _on_host(each) for name, each in x.items()}
    return x if isinstance(x, np.ndarray) else x.get()


def shares(structure: strategies.Structure, executor: str, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest ratio of an error to its bound for each result; infinite if it exceeds 1."""
    example = structure.example()
    if executor != "cpu" and example.q.dtype.itemsize == 2:  # tensor cores multiply rounded weights
        example = example.but(product_dtype=example.q.dtype)
    worst = {}
    for name, result in results.items():
        compared = {"others": result} if name == "captured" else {name: result}
        try:
            worst[name] = assertions.assert_within_bounds(example, **compared)
        except AssertionError:
            worst[name] = math.inf
    return worst


def features(structure: strategies.Structure, kernels: tuple[str, ...] = ()) -> list[str]:
    """Return the features of an example, as the ledger names them."""
    mask = structure.mask
    of_mask = "none" if mask is None else type(mask).__name__.lstrip("_")
    simple = {name for name in dir(masks) if isinstance(getattr(masks, name), type)}
    has = {
        f"mask {of_mask if mask is None or of_mask in simple else 'combined'}": True,
        "score": structure.score is not None,
        "sink": structure.sink is not None,
        "dropout": structure.dropout is not None,
        "grouped heads": structure.num_heads > structure.num_kv_heads,
        "batch that broadcasts": len({structure.q_batch, structure.k_batch, structure.v_batch}) > 1,
        "views": set(structure.layouts) != {"contiguous"},
        "unequal lengths": structure.seqlen_q != structure.seqlen_kv,
        "no queries or no keys": 0 in (structure.seqlen_q, structure.seqlen_kv),
        "low rows": structure.has_low_rows,
        f"values {structure.values}": True,
    }
    return [EVERY, *(name for name, applies in has.items() if applies), *(f"kernel {name}" for name in kernels)]


def draw(batch: Batch) -> tuple[Batch, list[Record], list[str]]:
    """Draw the examples of a batch; return its ledger rows, and the text of examples that exceed their bounds."""
    rows: dict[tuple[str, str], Record] = {}
    outside: list[str] = []

    @hypothesis.seed(f"{batch.executor} {batch.dtype} {batch.number}")
    @hypothesis.settings(
        max_examples=batch.size, phases=[hypothesis.Phase.generate, hypothesis.Phase.target], database=None,
        deadline=None, suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(structures(batch))
    def check(structure: strategies.Structure) -> None:
        called = call(structure, batch.executor)
        by_result = shares(structure, batch.executor, called.results)
        largest = max(by_result.values())
        hypothesis.target(min(largest, 2.0))
        if largest > 1:
            outside.append(f"{batch.executor}, {called.family}: {structure!r}")
        for feature in features(structure, called.kernels):
            row = rows.setdefault((called.family, feature), {})
            add(row, {"examples": 1, "outside": int(largest > 1), **by_result, "worst": repr(structure)})

    check()
    place = {"executor": batch.executor, "device": _device(batch.executor), "dtype": batch.dtype}
    return batch, [place | {"family": family, "feature": name} | row for (family, name), row in rows.items()], outside


def add(total: Record, row: Mapping[str, Any]) -> None:
    """Add a row's counts to a total, and keep the larger ratios and their example."""
    largest = max((float(row.get(name) or 0) for name in RESULTS))
    if "worst" not in total or largest > max(float(total.get(name) or 0) for name in RESULTS):
        total["worst"] = row["worst"]
    for name in ("examples", "outside"):
        total[name] = int(total.get(name) or 0) + int(row[name])
    for name in RESULTS:
        total[name] = max(float(total.get(name) or 0), float(row.get(name) or 0))


def added(ledger: dict[tuple[str, ...], Record], row: Record, batch: Batch) -> Record:
    """Add a batch's row to the ledger, and return the ledger's row."""
    total = ledger.setdefault(tuple(str(row[name]) for name in KEY), {name: row[name] for name in KEY})
    add(total, row)
    if row["feature"] == EVERY:
        total["batches"] = max(int(total.get("batches") or 0), batch.number + 1)
    return total


def _device(executor: str) -> str:
    return str(machine()["gpu"]) if executor == "gpu" else "host"


def ledger_of(path: Path) -> dict[tuple[str, ...], Record]:
    """Return the rows of a ledger by their key, without the columns of the machine."""
    rows = read_csv(path) if path.exists() else []
    return {tuple(row[name] for name in KEY): {n: x for n, x in row.items() if n not in machine()} for row in rows}


def batches(config: Config, ledger: Mapping[tuple[str, ...], Record]) -> Iterator[Batch]:
    """Yield batches that the ledger lacks, alternating between executors and dtypes, until the time is over."""
    deadline, begun = time.monotonic() + config.seconds, Counter[tuple[str, str]]()
    for (executor, _, dtype, _, feature), row in ledger.items():
        if feature == EVERY:
            begun[executor, dtype] = max(begun[executor, dtype], int(row.get("batches") or 0))
    while True:
        for executor in config.executors:
            for dtype in config.dtypes:
                if time.monotonic() > deadline:
                    return
                size = max(1, config.size // 10) if executor == "sim" else config.size
                yield Batch(executor, dtype, begun[executor, dtype], size)
                begun[executor, dtype] += 1


def run(config: Config, path: Path) -> tuple[list[Record], list[str]]:
    """Draw batches and add each to the ledger; return the ledger's rows, and the examples that exceed their bounds."""
    ledger, violations = ledger_of(path), list[str]()
    # one thread in each of the processes started below, which have a core each
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    ignore_interrupts = (signal.signal, (signal.SIGINT, signal.SIG_IGN))  # this process terminates the others
    with multiprocessing.get_context("spawn").Pool(config.processes, *ignore_interrupts) as pool:
        waiting, todo = [], batches(config, ledger)
        while True:
            while len(waiting) <= config.processes and (batch := next(todo, None)) is not None:
                waiting.append(pool.apply_async(draw, (batch,)))
            if not waiting:
                return list(ledger.values()), violations
            batch, rows, outside = waiting.pop(0).get()
            violations += outside
            print(f"{batch.executor} {batch.dtype} {batch.number}: {len(outside)} outside", flush=True)
            write_csv(path, [added(ledger, row, batch) for row in rows], KEY)


def table(rows: list[Record]) -> Table:
    """Tabulate the ledger by executor, dtype and family."""
    shown = Table("executor", "device", "dtype", "family", "examples", "outside", *RESULTS)
    for row in rows:
        if row["feature"] == EVERY:
            quotients = (f"{float(row.get(name) or 0):.3f}" for name in RESULTS)
            shown.add_row(*(str(row[name]) for name in (*KEY[:4], "examples", "outside")), *quotients)
    return shown


def main() -> None:
    config, results = parse_config(Config, __doc__)
    if "gpu" in config.executors and (reason := why_no_gpu()):
        sys.exit(f"soak needs a GPU for --executors gpu: {reason}")
    rows, violations = run(config, results / "soak.csv")
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows))
    print("wrote", os.path.relpath(results / "soak.csv"))
    if violations:
        sys.exit("outside their bounds:\n" + "\n".join(violations))


if __name__ == "__main__":
    main()
