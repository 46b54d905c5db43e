"""Is a change of the kernels faster? Times the same calls of two versions of cuflash alternately on one GPU.

    mkdir before; git archive HEAD~1 cuflash kernels_cu | tar x -C before
    python -m experiments before_after --before before                      # gradients, full and causal
    python -m experiments before_after --before before --masks blocks64_0.125 --head-dims 128 --seqlens 16384
    python -m experiments before_after --before before --deterministic

`--before` names a folder with another version's cuflash/ and kernels_cu/. Each version runs in a separate process,
which draws the same arrays and times batches of `repeats` calls on request, with the level-2 cache flushed before each
call. The versions alternate for `rounds` batches each; the result is the median of the batches' medians, and the width
of the middle half. Anything that slows the chip therefore affects both. Even so, long calls differ by up to 8 % between
pairs of processes, but far less within a pair (step 24 of sm90_steps.log at commit b648872e). `ratio` is the time
before divided by the time after. `difference` is the largest difference between the results of both versions in two
heads, divided by the largest element; a different order of sums changes it, too.

Needs an NVIDIA GPU and CuPy. Rows that a run does not measure are left unchanged.

Found:  each measured change has rows in results/before_after.csv, with both commits.

Cost: Minutes of a GPU, mostly for compiling two versions.
"""

import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from cuflash import masks
from harness import FOLDERS, Record, check_names, gpu_versions, main, time_on_device, track, why_no_gpu
from rich.table import Table
from spot_check import on_host
from workloads import draw, named_blocks, random_blocks

PASSES = ("forward", "backward")
CASE = ("gpu", "pass", "head_dim", "mask", "seqlen", "batch", "heads", "deterministic", "kernel", "before")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration; all calls use bfloat16."""

    before: str = ""
    passes: tuple[str, ...] = ("backward",)
    head_dims: tuple[int, ...] = (64, 128)
    masks: tuple[str, ...] = ("full", "causal")
    seqlens: tuple[int, ...] = (1024, 4096, 16384)
    tokens: int = 16384
    hidden: int = 2048
    kernel: str = "auto"
    deterministic: bool = False
    rounds: int = 5
    repeats: int = 8

    def __post_init__(self) -> None:
        check_names(self, {"passes": PASSES})
        if not (Path(self.before) / "kernels_cu").is_dir() or not self.before:
            raise ValueError(f"before must be a folder that holds cuflash/ and kernels_cu/; got {self.before!r}")
        if any(self.tokens % seqlen for seqlen in self.seqlens) or any(self.hidden % dim for dim in self.head_dims):
            raise ValueError("seqlens must divide tokens, and head_dims hidden")
        for mask in self.masks:
            named_blocks(mask)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pass of a problem; q, k and v are [batch, heads, seqlen, head_dim] each."""

    way: str
    head_dim: int
    mask: str
    seqlen: int
    batch: int
    heads: int
    deterministic: bool
    kernel: str

    def mask_of(self) -> masks.Mask | None:
        blocks = named_blocks(self.mask)
        if blocks is not None:
            return masks.BlockPattern(random_blocks(self.heads, self.seqlen, *blocks), blocks[0])
        return masks.Causal() if self.mask == "causal" else None


def cases(config: Config) -> list[Case]:
    grid = itertools.product(config.passes, config.head_dims, config.masks, config.seqlens)
    return [
        Case(
            way=way, head_dim=dim, mask=mask, seqlen=seqlen, batch=config.tokens // seqlen, heads=config.hidden // dim,
            deterministic=config.deterministic, kernel=config.kernel,
        )
        for way, dim, mask, seqlen in grid
    ]  # fmt: skip


# The child process of one version


def serve() -> None:
    """Answer each line of standard input with one line: prepare a case or, for a number n, time n calls."""
    call: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            answer: Any = time_on_device({"call": call}, repeats=request, warmup=1)["call"].median_ms
        else:
            call = None  # frees its arrays before new ones are allocated
            call, answer = ready(Case(**request["case"]), Path(request["results"]))
        print(json.dumps(answer), flush=True)


@functools.cache
def drawn(size: int) -> list[Any]:
    """Draw q, k, v and do with `size` elements; all cases of a run share them."""
    return draw(size, dtype=np.dtype(ml_dtypes.bfloat16))


def ready(case: Case, results: Path) -> tuple[Any, list[str]]:
    """Return a call and the kernels that it launches; write the results of the first and last head to a file."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    shape = (case.batch, case.heads, case.seqlen, case.head_dim)
    q, k, v, do = (x.reshape(shape) for x in drawn(int(np.prod(shape))))
    options: dict[str, Any] = {"mask": case.mask_of(), "kernel": case.kernel, "deterministic": case.deterministic}
    plan = cuflash.plan(q, k, v, **options)
    plan.compile()
    o, lse = plan.forward(q, k, v)

    def call() -> Any:
        return plan.forward(q, k, v) if case.way == "forward" else plan.backward(do, q, k, v, o, lse)

    names = ("o", "lse") if case.way == "forward" else ("dq", "dk", "dv")
    corners = {name: [on_host(x[place]) for place in ((0, 0), (-1, -1))] for name, x in zip(names, call(), strict=True)}
    np.savez(results, **{name: np.asarray(x, np.float32) for name, x in corners.items()})
    return call, [spec.name for spec in plan._plan.specs.values()]


# The parent process, which compares both versions


class Version:
    """A child process that runs one version of the library."""

    def __init__(self, folder: Path) -> None:
        paths = [str(folder.resolve()), *FOLDERS]
        code = f"import sys; sys.path[:0] = {paths!r}; import before_after; before_after.serve()"
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, "-c", code], **streams)

    def ask(self, what: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):  # the missing answer is detected below
            stdin.write(json.dumps(what) + "\n")
            stdin.flush()
        line = stdout.readline()
        if not line:
            sys.exit(f"before_after: a version's process ended with status {self._process.wait()}; its error is above")
        return json.loads(line)

    def end(self) -> None:
        """End the process and drop its remaining output."""
        self._process.terminate()
        with suppress(BrokenPipeError):
            self._process.communicate()


def compare(case: Case, config: Config, versions: dict[str, Version], folder: Path) -> Record:
    """Return both versions' times of a case, and the difference of their results."""
    kernels = {}
    for name, version in versions.items():
        kernels[name] = version.ask({"case": asdict(case), "results": str(folder / f"{name}.npz")})
    batches: dict[str, list[float]] = {name: [] for name in versions}
    for _ in range(config.rounds):
        for name, version in versions.items():
            batches[name].append(version.ask(config.repeats))
    row: Record = {("pass" if name == "way" else name): value for name, value in asdict(case).items()}
    row["before"] = Path(config.before).name
    medians = {name: float(np.median(times)) for name, times in batches.items()}
    row |= {f"{name}_ms": median for name, median in medians.items()}
    row |= {f"{name}_spread_ms": float(np.subtract(*np.percentile(x, (75, 25)))) for name, x in batches.items()}
    row |= {"ratio": medians["before"] / medians["after"], "difference": difference(folder)}
    return row | {"kernels": " ".join(dict.fromkeys(kernels["after"])), "rounds": config.rounds}


def difference(folder: Path) -> float:
    """Return the largest difference between the results of two versions, relative to the largest element."""
    with np.load(folder / "before.npz") as before, np.load(folder / "after.npz") as after:
        return max(float(np.abs(after[x] - before[x]).max() / np.abs(before[x]).max()) for x in before.files)


def run(config: Config) -> Iterator[Record]:
    """Yield one record per case."""
    reason = why_no_gpu()
    if reason:
        sys.exit(f"before_after compares versions on a GPU: {reason}")
    versions = {"before": Version(Path(config.before)), "after": Version(Path(__file__).parents[2])}
    try:
        with TemporaryDirectory() as folder:
            for case in track(cases(config), "cases"):
                row = compare(case, config, versions, Path(folder)) | gpu_versions()
                shown = " ".join(str(row[name]) for name in ("pass", "head_dim", "mask", "seqlen"))
                times = f"{row['before_ms']:.4f} -> {row['after_ms']:.4f} ms"
                print(f"{shown}: {times}, {row['difference']:.1e}", flush=True)
                yield row
    finally:
        for version in versions.values():
            version.end()


def table(records: list[Record]) -> Table:
    """Tabulate one line per case."""
    titles = ("before ms", "after ms", "before / after", "difference", "kernels")
    shown = Table("pass", "head_dim", "mask", "seqlen", *titles)
    for row in records:
        names = [str(row[name]) for name in ("pass", "head_dim", "mask", "seqlen")]
        times = [f"{row['before_ms']:.4f}", f"{row['after_ms']:.4f}", f"{row['ratio']:.3f}", f"{row['difference']:.1e}"]
        shown.add_row(*names, *times, row["kernels"])
    return shown


if __name__ == "__main__":
    main(Config, run, table, replacing=CASE)
