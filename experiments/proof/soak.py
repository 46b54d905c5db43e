"""How near do drawn examples come to their error bounds? A ledger that accumulates over runs.

    make soak SECONDS=3600                                           # the cpu executor, into the committed ledger
    python -m experiments soak --seconds 600 --executors cpu,sim     # into build/results/soak.csv
    python -m experiments soak --executors gpu --processes 16 --seconds 300

Draws examples from `cuflash.testing.structures`: lengths that are not multiples of a tile, masks of every kind, strided
views, scales up to 1e4, and, with probability 1/5 each, a score function, a sink, dropout, blocks that each query
chooses, or none of these. Runs both passes and divides the error of each result by its bound; Hypothesis steers the
later examples of a batch towards larger ratios. Each drawn structure has four examples on the cpu executor, twenty on a
GPU and one on the simulator, with numbers and scales of their own, and the same kernels with few exceptions. The ledger
counts structures and examples.

On the simulator and on a GPU a kernel is compiled before its first example, which takes as long as a hundred examples.
Therefore all examples of a batch request the same kernel family, round head_dim and value_dim up to the same sizes, and
share a score function, and so do later batches of the same round; the next round has other sizes and functions. `auto`
replaces a family that refuses an example.

A row of the ledger stands for an executor, a device, a dtype, a family and a feature. It has the number of examples,
how many of them exceeded a bound, and the largest ratio for each result; the row of all features also has the example
with the largest of all ratios. An example counts once in the row of each of its features, including the kind of its
mask and each kernel that it used. `batches` counts the seeds used, so that a run continues with examples that no
earlier run has drawn. Up to commit 3c13f801, a GPU got a block index instead of a mask with documents; its rows include
those examples. Rows are written after each batch. soak_specifications.csv counts the examples of each kernel
specification; `specifications` and `rare` count these specifications, and those with fewer than 20 examples.

Expect: no example exceeds its bounds; exit status 0, otherwise 1.
Found:  none of 1,001,308 examples on the cpu executor and 561,000 on an H200 exceeds them; the largest ratio is 0.67.

Cost: 8 to 16 ms of a core per example on the cpu executor of a busy machine, a second on the simulator.
"""

import functools
import hashlib
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import cuflash
import hypothesis
import numpy as np
from cuflash import UnsupportedProblem, masks
from cuflash.masks.content import held_arrays, held_masks
from cuflash.planning.spec import KernelSpec
from cuflash.testing import assertions, strategies
from cuflash.testing.mask_strategies import chosen_blocks
from harness import Record, machine, parse_config, read_csv, why_no_gpu, write_csv
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from sim_against_gpu import masked, to_device

RESULTS = ("o", "lse", "dq", "dk", "dv", "captured", "dsink")
DTYPES = ("float16", "bfloat16", "float32", "float64")
EXECUTORS = ("cpu", "sim", "gpu")
COUNTS = ("structures", "examples", "outside")
FAMILIES_OF = dict.fromkeys(DTYPES[:2], ("auto", "simt", "sm80", "sm90")) | dict.fromkeys(DTYPES[2:], ("auto", "simt"))
DIMS = strategies.HEAD_DIMS
# Sizes to which kernels round head_dim and value_dim, in the order of the rounds.
SIZES = (
    (64, 64), (128, 128), (32, 32), (256, 256), (96, 96), (128, 64), (64, 128), (256, 128), (32, 64), (96, 64),
)  # fmt: skip
NUMBERS = {"cpu": 4, "sim": 1, "gpu": 20}  # examples of a structure
ROUND = 16  # batches of a family in a round
OFTEN = 20  # examples of a specification that is not rare
KEY = ("executor", "device", "dtype", "family", "feature")
SPEC_KEY = ("executor", "device", "dtype", "family", "kernel", "specification")
EVERY = "any"  # feature of the row that counts all examples of a dtype and family


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a run; the defaults take five minutes."""

    seconds: float = field(default=300.0, metadata={"help": "when to stop; batches that have begun are finished"})
    executors: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = DTYPES
    size: int = field(default=200, metadata={"help": "structures of a batch; sim takes a tenth, gpu a quarter"})
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

    @property
    def family(self) -> str:
        """The kernel family that the examples request."""
        families = FAMILIES_OF[self.dtype]
        return "auto" if self.executor == "cpu" else families[self.number % len(families)]

    @property
    def round(self) -> int:
        """The number of the round, in which every family of the dtype takes `ROUND` batches."""
        return self.number // (ROUND * len(FAMILIES_OF[self.dtype]))

    @property
    def dims(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The head_dims and the value_dims of the examples; kernels round each of the two up to one size."""
        pair = (32, 32) if self.executor == "sim" else SIZES[self.round % len(SIZES)]
        head_dims, value_dims = (tuple(dim for dim in DIMS if _rounded(dim) == size) for size in pair)
        return head_dims, value_dims


def _rounded(dim: int) -> int:
    return next(size for size in (32, 64, 96, 128, 256) if size >= dim)


@functools.cache
def formula_of(round_number: int, dtype: str) -> strategies.Formula:
    """Return the score function of a round."""
    drawn: list[strategies.Formula] = []

    @hypothesis.seed(f"{dtype} {round_number}")
    @hypothesis.settings(max_examples=20, phases=[hypothesis.Phase.generate], database=None, deadline=None)
    @hypothesis.given(strategies.formulas())
    def keep(formula: strategies.Formula) -> None:
        drawn.append(formula)

    keep()
    return drawn[-1]  # the first ones are the simplest


def structures(batch: Batch) -> st.SearchStrategy[strategies.Structure]:
    """Return a strategy for the examples of a batch, which its executor can run in a reasonable time."""
    # Most examples are small, since the oracle and the bounds take longer than all else for 1 << 14 scores, and the
    # oracle takes ten times as long for float64. It evaluates score functions slowly.
    most_scores = 1 << 12 + 2 * (batch.number % 8 == 0) + 2 * (batch.number % 64 == 0 and batch.dtype != "float64")
    kinds: list[dict[str, Any]] = [{}, {"has_sink": True}, {"has_dropout": True}, {"masks": chosen_blocks}]
    room: dict[str, Any] = {"most_scores": most_scores}
    small = {"widest": 16, "most_scores": 1 << 8, "longest": 40}
    if batch.executor == "sim":
        room = small = {"widest": 32, "most_scores": 1 << 13, "most_rows": 400}
    drawn = functools.partial(strategies.structures, dtypes=(batch.dtype,))
    scored = drawn(**small, has_score=batch.executor == "cpu")
    others = [drawn(**room, **kind) for kind in kinds]
    if batch.executor == "cpu":
        return st.one_of(scored, *others)
    formula = formula_of(batch.round, batch.dtype)
    scored = scored.map(lambda structure: replace(structure, score=formula))

    def resized(structure: strategies.Structure, head_dim: int, value_dim: int) -> strategies.Structure:
        return replace(structure, head_dim=head_dim, value_dim=value_dim)

    return st.builds(resized, st.one_of(scored, *others), *map(st.sampled_from, batch.dims))


def others(structure: strategies.Structure, executor: str) -> Iterator[strategies.Structure]:
    """Yield structures with other numbers and scales, for which nothing is drawn or compiled again."""
    rng = np.random.default_rng(structure.seed)
    for _ in range(NUMBERS[executor] - 1):
        values, scale = str(rng.choice(strategies.VALUES)), float(rng.choice(strategies.SCALES))
        other = replace(structure, values=values, scale=None if rng.random() < 0.5 else scale)
        seeds = map(int, iter(functools.partial(rng.integers, 1 << 32), None))
        yield next(drawn for seed in seeds if _in_kernels(drawn := replace(other, seed=seed)) == _in_kernels(structure))


def is_deterministic(structure: strategies.Structure) -> bool:
    """Return whether the gradients of an example are requested with deterministic=True."""
    return bool(structure.seed // 8 % 2)


def _in_kernels(structure: strategies.Structure) -> tuple[object, ...]:
    """Return what the seed determines of kernel specifications."""
    arrays = structure.score.arrays(structure.mask_shape, structure.seed) if structure.score is not None else {}
    return is_deterministic(structure), [array.dtype for array in arrays.values()]


class Call(NamedTuple):
    """Results of a call, the family that the call requested, and the kernels that it launched."""

    results: dict[str, Any]
    family: str
    kernels: tuple[KernelSpec, ...]


def on_gpu(mask: Any, shape: masks.MaskShape) -> Any:
    """Return a mask with its arrays on the GPU; if ids of documents are unsorted, return its index instead."""
    ids = [array for each in held_masks(mask) if type(each) is masks.Documents for array in held_arrays(each)]
    if all((array[..., 1:] >= array[..., :-1]).all() for array in ids):
        return masked(mask, "gpu")
    return cuflash.BlockIndex.from_mask(mask, block=32, **shape._asdict())


def call(structure: strategies.Structure, example: Any, executor: str, family: str) -> Call:
    """Run both passes with a family, or with the default family if that one refuses."""
    q, k, v, do, dlse, sink = (getattr(example, name) for name in ("q", "k", "v", "do", "dlse", "sink"))
    mask, score = example.mask, example.score
    if executor == "gpu":
        q, k, v, do = (to_device(x, layout) for x, layout in zip((q, k, v, do), structure.layouts, strict=False))
        dlse, sink = (None if x is None else to_device(x, "contiguous") for x in (dlse, sink))
        mask = on_gpu(mask, structure.mask_shape)
        if score is not None:
            score = cuflash.scores.Score(
                structure.score, **{name: to_device(x, "contiguous") for name, x in score.arrays.items()}
            )
    wrt = (*example.wrt, *(("sink",) if sink is not None else ()))
    options = {"mask": mask, "scale": example.scale, "score": score, "sink": sink, "dropout": example.dropout}
    options |= {"wrt": wrt, "executor": executor, "deterministic": is_deterministic(structure)}
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
    specs: tuple[KernelSpec, ...] = ()
    if executor != "cpu":
        plan = cuflash.plan(q, k, v, **options, kernel=kernel)
        specs = tuple(dict.fromkeys(plan._plan.specs.values()))
    return Call({name: _on_host(x) for name, x in named.items()}, kernel, specs)


@functools.cache
def digest_of(spec: KernelSpec) -> str:
    """Return a digest of all that a specification says."""
    of_score = [getattr(spec, each.name) for each in fields(spec) if each.name.startswith("score")]
    return hashlib.sha256(f"{spec} {of_score}".encode()).hexdigest()[:12]


def _on_host(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {name: _on_host(each) for name, each in x.items()}
    return x if isinstance(x, np.ndarray) else x.get()


def shares(example: Any, executor: str, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest ratio of an error to its bound for each result; infinite if it exceeds 1."""
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


class Drawn(NamedTuple):
    """The ledger rows of a batch, texts of examples that fail or exceed their bounds, and rows of specifications."""

    batch: Batch
    rows: list[Record]
    outside: list[str]
    specs: list[Record]


def draw(batch: Batch) -> Drawn:
    """Draw the examples of a batch."""
    rows: dict[tuple[str, str], Record] = {}
    specs = Counter[tuple[str, KernelSpec]]()
    outside: list[str] = []

    @hypothesis.seed(f"{batch.executor} {batch.dtype} {batch.number}")
    @hypothesis.settings(
        max_examples=batch.size, phases=[hypothesis.Phase.generate, hypothesis.Phase.target], database=None,
        deadline=None, suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(structures(batch))
    def check(drawn: strategies.Structure) -> None:
        largest_of_all = 0.0
        for number, structure in enumerate([drawn, *others(drawn, batch.executor)]):
            example = structure.example()
            try:
                called = call(structure, example, batch.executor, batch.family)
            except Exception as error:
                (*_, place) = traceback.extract_tb(error.__traceback__)
                outside.append(f"{batch.executor}, {batch.family}: {error!r} in {place}: {structure!r}")
                continue
            by_result = shares(example, batch.executor, called.results)
            largest = max(by_result.values())
            largest_of_all = max(largest, largest_of_all)
            if largest > 1:
                outside.append(f"{batch.executor}, {called.family}: {structure!r}")
            specs.update((called.family, spec) for spec in called.kernels)
            counts = {"structures": int(number == 0), "examples": 1, "outside": int(largest > 1)}
            for feature in features(structure, tuple(dict.fromkeys(spec.name for spec in called.kernels))):
                add(rows.setdefault((called.family, feature), {}), {**counts, **by_result, "worst": structure})
        hypothesis.target(min(largest_of_all, 2.0))

    check()
    place = {"executor": batch.executor, "device": _device(batch.executor), "dtype": batch.dtype}
    return Drawn(
        batch,
        [
            place | {"family": family, "feature": name} | row | {"worst": repr(row["worst"]) if name == EVERY else ""}
            for (family, name), row in rows.items()
        ],
        outside,
        [
            place | {"family": family, "kernel": spec.name, "specification": digest_of(spec), "examples": count}
            for (family, spec), count in specs.items()
        ],
    )


def add(total: Record, row: Mapping[str, Any]) -> None:
    """Add a row's counts to a total, and keep the larger ratios and their example."""
    largest = max((float(row.get(name) or 0) for name in RESULTS))
    if "worst" not in total or largest > max(float(total.get(name) or 0) for name in RESULTS):
        total["worst"] = row["worst"]
    for name in COUNTS:
        total[name] = int(total.get(name) or 0) + int(row[name])
    for name in RESULTS:
        total[name] = max(float(total.get(name) or 0), float(row.get(name) or 0))


class Ledger:
    """The rows of a ledger by their key, and the numbers of examples of each specification."""

    def __init__(self, path: Path) -> None:
        self._path, self._specs_path = path, path.with_name("soak_specifications.csv")
        self.rows, specs = _rows_of(path, KEY), _rows_of(self._specs_path, SPEC_KEY)
        self._examples = Counter({key: int(row["examples"]) for key, row in specs.items()})

    def add(self, drawn: Drawn) -> None:
        """Add the rows of a batch, and write them."""
        for row in drawn.specs:
            self._examples[tuple(str(row[name]) for name in SPEC_KEY)] += row["examples"]
        write_csv(self._path, [self._added(row, drawn.batch) for row in drawn.rows], KEY)
        if drawn.specs:
            counts = ((key, self._examples[key]) for row in drawn.specs if (key := tuple(row[x] for x in SPEC_KEY)))
            write_csv(
                self._specs_path, [dict(zip(SPEC_KEY, key)) | {"examples": count} for key, count in counts], SPEC_KEY
            )

    def _added(self, row: Record, batch: Batch) -> Record:
        key = tuple(str(row[name]) for name in KEY)
        total = self.rows.setdefault(key, {name: row[name] for name in KEY})
        add(total, row)
        if row["feature"] == EVERY:
            total["batches"] = max(int(total.get("batches") or 0), batch.number + 1)
            counts = [count for each, count in self._examples.items() if each[:4] == key[:4]]
            total |= {"specifications": len(counts), "rare": sum(count < OFTEN for count in counts)}
        return total


def _rows_of(path: Path, key: tuple[str, ...]) -> dict[tuple[str, ...], Record]:
    """Return the rows of a file by their key, without the columns of the machine."""
    rows = read_csv(path) if path.exists() else []
    return {tuple(row[name] for name in key): {n: x for n, x in row.items() if n not in machine()} for row in rows}


def _device(executor: str) -> str:
    return str(machine()["gpu"]) if executor == "gpu" else "host"


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
                size = max(1, config.size // {"cpu": 1, "sim": 10, "gpu": 4}[executor])
                yield Batch(executor, dtype, begun[executor, dtype], size)
                begun[executor, dtype] += 1


def start(index: Any, executors: tuple[str, ...]) -> None:
    """Prepare a process, which takes one of the GPUs in turn, and leaves interrupts to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "gpu" in executors:
        import cupy

        with index.get_lock():
            number = index.value
            index.value += 1
        cupy.cuda.Device(number % cupy.cuda.runtime.getDeviceCount()).use()


def run(config: Config, path: Path) -> tuple[list[Record], list[str]]:
    """Draw batches and add each to the ledger; return the ledger's rows, and the failures."""
    ledger, failures = Ledger(path), list[str]()
    # one thread in each of the processes started below, which have a core each
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with context.Pool(config.processes, start, (context.Value("i", 0), config.executors)) as pool:
        waiting, todo = [], batches(config, ledger.rows)
        while True:
            while len(waiting) <= config.processes and (batch := next(todo, None)) is not None:
                waiting.append((batch, pool.apply_async(draw, (batch,))))
            if not waiting:
                return list(ledger.rows.values()), failures
            place = next((place for place, (_, result) in enumerate(waiting) if result.ready()), 0)
            batch, result = waiting.pop(place)
            try:
                drawn = result.get()
            except Exception as error:  # the other batches are worth as much
                failures.append(f"{batch}: {type(error).__name__}: {error}")
                continue
            failures += drawn.outside
            heading = f"{batch.executor} {batch.dtype} {batch.number}: {len(drawn.outside)} outside"
            print(heading, *drawn.outside, sep="\n")
            sys.stdout.flush()
            ledger.add(drawn)


def table(rows: list[Record]) -> Table:
    """Tabulate the ledger by executor, dtype and family."""
    counts = (*COUNTS, "specifications", "rare")
    shown = Table(*KEY[:4], *counts, *RESULTS)
    for row in rows:
        if row["feature"] == EVERY:
            texts = (str(row.get(name) or 0) for name in (*KEY[:4], *counts))
            shown.add_row(*texts, *(f"{float(row.get(name) or 0):.3f}" for name in RESULTS))
    return shown


def main() -> None:
    config, results = parse_config(Config, __doc__)
    if "gpu" in config.executors and (reason := why_no_gpu()):
        sys.exit(f"soak needs a GPU for --executors gpu: {reason}")
    rows, failures = run(config, results / "soak.csv")
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows))
    print("wrote", os.path.relpath(results / "soak.csv"))
    if failures:
        sys.exit("outside their bounds, or failed:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
