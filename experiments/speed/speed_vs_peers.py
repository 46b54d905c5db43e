"""Who is faster on the same data? Times cuflash and its peers alternately on one GPU in one process.

    python -m experiments speed_vs_peers                                             # bfloat16, full and causal
    python -m experiments speed_vs_peers --masks blocks128 --head-dims 128 --seqlens 16384 --peers flex,flash_attn_4
    python -m experiments speed_vs_peers --dtypes float32 --peers sdpa_efficient --kernel simt
    python -m experiments speed_vs_peers --dtypes float32 --peers sdpa_efficient --precision tf32x3

Needs an NVIDIA GPU, CuPy and PyTorch; peers (peers.py) that are missing, or do not support a case, are recorded with
the reason. `--masks` takes full, causal, blocks<size>_<density>, and blocks<size> for all `--densities`: random blocks,
the same number in each head and including the diagonal. Rows of the result that a run does not measure are left
unchanged; measured rows are written one by one.

Every case has `tokens` tokens of `hidden` channels, standard normal. Every method computes o and, if its interface
returns it, lse. Before it is timed, some rows of two heads and the gradients for them are compared with float64
(spot_check.py): errors are divided by our kernels' bound, and may be up to 2 for a peer, which may round once more
often. Then the methods alternate, and each call is timed between CUDA events, with the level-2 cache flushed before it:
medians, and the width of the middle half. The backward pass is timed alone. A method that takes less than 0.04 ms is
timed again as a CUDA graph; `graphs` names it. FlashAttention-3's package takes JAX arrays, and runs on a stream that
such events do not cover. Its calls are timed after the other methods: as many as take 50 ms are queued, the host waits
for all of them, and the time is divided by their number; the cache is flushed before the first one. `ratio` is the
peer's time divided by ours. TFLOP/s count the paper's products, forward 2 and backward 5, half of them if causal, and
those of kept blocks if block-sparse. gemm_tflops is the rate of torch.matmul on 8192 x 8192 bfloat16 matrices in the
same run.

Found:  on an H100 in bfloat16, the mean times of the fastest peer and of cuflash differ by a few per cent; the README
and docs/performance.md have the tables.

Cost: An hour of a GPU for all cases, minutes for one head_dim.
"""

import itertools
import re
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import geometric_mean
from typing import Any, NamedTuple

import cuflash
import ml_dtypes
import numpy as np
from cuflash import masks
from harness import Record, Timing, check_names, gpu_versions, main, time_on_device, track, why_no_gpu
from matplotlib.figure import Figure
from peers import PEERS, Wanted, peer_of, versions
from rich.table import Table
from spot_check import SpotCheck
from workloads import blocks_name, flops, named_blocks, num_kept, random_blocks

WAYS = ("forward", "backward")
DTYPES = ("float16", "bfloat16", "float32")
# Columns that distinguish the rows of a result. Rows of older commits stay, but a set of cases has the rows of only one
# commit.
CASE = ("gpu", "dtype", "pass", "head_dim", "mask", "seqlen", "batch", "heads", "request", "kernel", "commit")
OURS = "cuflash"
GRAPH_BELOW_MS = 0.04
# Prepares a pass on the current stream, and returns a function that runs it.
Prepared = Callable[[], Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration; the defaults are those of the published run."""

    passes: tuple[str, ...] = WAYS
    head_dims: tuple[int, ...] = (64, 128, 256)
    masks: tuple[str, ...] = ("full", "causal")
    densities: tuple[float, ...] = (0.5, 0.25, 0.125, 0.0625, 0.031)
    seqlens: tuple[int, ...] = (1024, 4096, 16384)
    tokens: int = 16384
    hidden: int = 2048
    dtypes: tuple[str, ...] = ("bfloat16",)
    kernel: str = "auto"
    precision: str = "ieee"
    peers: tuple[str, ...] = ("sdpa_flash", "sdpa_cudnn", "flash_attn_3", "flash_attn_4")
    repeats: int = 30

    def __post_init__(self) -> None:
        if self.precision != "ieee" and set(self.dtypes) != {"float32"}:
            raise ValueError(f"precision {self.precision} is for float32; dtypes are {', '.join(self.dtypes)}")
        check_names(self, {"passes": WAYS, "dtypes": DTYPES, "peers": PEERS})
        if min(*self.head_dims, *self.seqlens, self.tokens, self.hidden, self.repeats) < 1:
            raise ValueError("lengths, dims and repeats must be positive")
        if any(self.tokens % seqlen for seqlen in self.seqlens) or any(self.hidden % dim for dim in self.head_dims):
            raise ValueError("seqlens must divide tokens, and head_dims hidden")
        for mask in self.mask_names:
            named_blocks(mask)

    @property
    def mask_names(self) -> tuple[str, ...]:
        """The masks; a block size alone stands for one mask per density."""
        names = list[str]()
        for mask in self.masks:
            bare = re.fullmatch(r"blocks(\d+)", mask)
            names += [blocks_name(int(bare[1]), density) for density in self.densities] if bare else [mask]
        return tuple(names)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem; q, k and v are [batch, num_heads, seqlen, head_dim] each."""

    head_dim: int
    mask: str
    seqlen: int
    batch: int
    num_heads: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} d{self.head_dim} {self.mask} {self.seqlen}"

    def wanted(self) -> Wanted:
        """Return the mask in the form that peers take and in ours."""
        blocks = named_blocks(self.mask)
        if blocks is None:
            return Wanted(is_causal=self.mask == "causal")
        return Wanted(is_causal=False, blocks=random_blocks(self.num_heads, self.seqlen, *blocks), block=blocks[0])


def cases(config: Config) -> list[Case]:
    """Return all cases whose blocks divide the length; print the others to standard error."""
    result = []
    grid = itertools.product(config.dtypes, config.head_dims, config.mask_names, config.seqlens)
    for dtype, head_dim, mask, seqlen in grid:
        blocks = named_blocks(mask)
        try:
            if blocks is not None:
                num_kept(seqlen, *blocks)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        batch, num_heads = config.tokens // seqlen, config.hidden // head_dim
        result.append(
            Case(head_dim=head_dim, mask=mask, seqlen=seqlen, batch=batch, num_heads=num_heads, dtype=dtype)
        )
    return result


def mask_of(wanted: Wanted) -> masks.Mask | None:
    """Return cuflash's mask of a case."""
    if wanted.blocks is not None:
        return masks.BlockPattern(wanted.blocks, wanted.block)
    return masks.Causal() if wanted.is_causal else None


def as_cupy(x: Any) -> Any:
    """View a CUDA tensor of PyTorch as a CuPy array, via its bits, since not every CuPy version imports bfloat16."""
    import cupy
    import torch

    if x.dtype != torch.bfloat16:
        return cupy.from_dlpack(x)
    return cupy.ndarray(tuple(x.shape), ml_dtypes.bfloat16, cupy.from_dlpack(x.view(torch.int16)).data)


def as_torch(x: np.ndarray) -> Any:
    """Copy a NumPy array to a CUDA tensor of PyTorch."""
    import torch

    if x.dtype != ml_dtypes.bfloat16:
        return torch.from_numpy(x).cuda()
    return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)


class Ours:
    """cuflash's passes on PyTorch tensors, with the interface of a peer."""

    num_calls = 1

    def __init__(self, wanted: Wanted, kernel: str, precision: str, q: Any, k: Any, v: Any) -> None:
        self._inputs = [as_cupy(x) for x in (q, k, v)]
        self.plan = cuflash.plan(*self._inputs, mask=mask_of(wanted), kernel=kernel, precision=precision)
        self.plan.compile()

    def forward(self) -> dict[str, Any]:
        return dict(zip(("o", "lse"), self.plan.forward(*self._inputs), strict=True))

    def backward(self, do: Any) -> Callable[[], dict[str, Any]]:
        (o, lse), do = self.plan.forward(*self._inputs), as_cupy(do)
        names = ("dq", "dk", "dv")
        return lambda: dict(zip(names, self.plan.backward(do, *self._inputs, o, lse), strict=True))

    def timed(self, way: str, do: Any) -> Callable[[], object]:
        return self.forward if way == "forward" else self.backward(do)

    def replay(self, make: Prepared) -> Callable[[], object]:
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            call = make()
            call()
            stream.synchronize()
            stream.begin_capture()
            call()
            graph = stream.end_capture()

        def replayed() -> Callable[[], object]:
            graph.launch(cupy.cuda.get_current_stream())
            return call  # keeps the arrays that the graph reads alive

        return replayed


class Wrong(Exception):
    """The error raised if a result exceeds its bound."""


@contextmanager
def noted(notes: dict[str, str], name: str) -> Iterator[None]:
    """Record in `notes` why a method is left out.

    Of cuflash's errors, only unsupported problems and wrong results are accepted. PyTorch issues warnings with the
    reasons why a kernel does not support a call, before an error without them.
    """
    expected = (cuflash.UnsupportedProblem, MemoryError, Wrong) if name == OURS else (Exception,)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield
        except expected as error:
            lines = [str(error).strip() or type(error).__name__, *(str(warning.message) for warning in said)]
            notes[name] = "; ".join(dict.fromkeys(line.strip().splitlines()[0] for line in lines))[:300]
            print(f"{name}: {notes[name]}", file=sys.stderr)


def checked(name: str, check: SpotCheck, results: Mapping[str, Any]) -> float:
    """Return the largest ratio of an error to its bound.

    Raise Wrong if the ratio exceeds 1, or 2 for a peer, which may round once more often.
    """
    share = check.share(**results)
    if not share <= (1 if name == OURS else 2):
        raise Wrong(f"wrong: {share:.3g} times the bound on {', '.join(results)}")
    return share


def compare(case: Case, config: Config) -> Iterator[Record]:
    """Yield a record for each pass and peer."""
    import torch

    shape = (case.batch, case.num_heads, case.seqlen, case.head_dim)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, case.dtype)) for _ in range(4)
    )
    wanted = case.wanted()
    check = SpotCheck.of(*(as_cupy(x) for x in (q, k, v)), mask_of(wanted), config.precision)
    contenders: dict[str, Any] = {}
    missing: dict[str, str] = {}
    with noted(missing, OURS):
        contenders[OURS] = Ours(wanted, config.kernel, config.precision, q, k, v)
    for name in config.peers:
        with noted(missing, name):
            contenders[name] = peer_of(name, wanted, q, k, v)
    kernel = contenders[OURS].plan._plan.family.name if OURS in contenders else config.kernel
    kernel += f" {config.precision}" * (config.precision != "ieee")
    for way in config.passes:
        notes, errors, prepared = dict(missing), dict[str, float](), dict[str, Prepared]()
        for name, contender in contenders.items():
            with noted(notes, name):
                if way == "forward":
                    errors[name] = checked(name, check, contender.forward())
                else:
                    errors[name] = checked(name, check, contender.backward(as_torch(check.do))())
                prepared[name] = partial(contender.timed, way, do)
        times, graphs = timed(prepared, contenders, notes, config.repeats)
        print(f"{case} {way}:", ", ".join(f"{name} {timing.median_ms:.4g} ms" for name, timing in times.items()))
        for record in records_of(case, way, kernel, config.peers, times, errors, notes, graphs):
            yield record | {"request": config.kernel}


def timed(
    prepared: Mapping[str, Prepared], contenders: Mapping[str, Any], notes: dict[str, str], repeats: int
) -> tuple[dict[str, Timing], set[str]]:
    """Time the methods alternately; also return the names of short ones, which were timed as graphs."""
    calls: dict[str, Callable[[], object]] = {}
    for name, make in prepared.items():
        with noted(notes, name):
            calls[name] = make()
    graphs = set()
    for name, timing in time_on_device(calls, repeats=5).items():
        if timing.median_ms < GRAPH_BELOW_MS:
            with noted(notes, name):
                calls[name] = contenders[name].replay(prepared[name])
                graphs.add(name)
    apart = {name: call for name, call in calls.items() if contenders[name].num_calls > 1}
    times = time_on_device({name: call for name, call in calls.items() if name not in apart}, repeats=repeats)
    for name, call in apart.items():
        times[name] = time_on_device({name: call}, repeats=repeats)[name].over(contenders[name].num_calls)
    return times, graphs


def records_of(
    case: Case,
    way: str,
    kernel: str,
    peers: Sequence[str],
    times: Mapping[str, Timing],
    errors: Mapping[str, float],
    notes: Mapping[str, str],
    graphs: set[str],
) -> Iterator[Record]:
    """Return a record for each peer; if the peer, or cuflash, did not take part, it has the reason instead of times."""
    ours = times.get(OURS)
    row: Record = {"pass": way, "head_dim": case.head_dim, "mask": case.mask, "seqlen": case.seqlen}
    row |= {"batch": case.batch, "heads": case.num_heads, "dtype": case.dtype, "kernel": kernel}
    for peer in peers:
        theirs = times.get(peer)
        yield row | {
            "peer": peer,
            "peer_ms": theirs and theirs.median_ms,
            "cuflash_ms": ours and ours.median_ms,
            "ratio": theirs.median_ms / ours.median_ms if theirs and ours else None,
            "peer_spread_ms": theirs and theirs.spread_ms,
            "cuflash_spread_ms": ours and ours.spread_ms,
            "repeats": max((timing.repeats for timing in (ours, theirs) if timing), default=0),
            "graphs": " ".join(name for name in (OURS, peer) if name in graphs),
            "peer_error": errors.get(peer),
            "cuflash_error": errors.get(OURS),
            "note": "; ".join(f"{name}: {notes[name]}" for name in (OURS, peer) if name in notes),
        }


def gemm_tflops(repeats: int, size: int = 8192) -> float:
    """Return the rate of PyTorch's bfloat16 matrix product."""
    import torch

    a, b, c = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    times = time_on_device({"gemm": lambda: torch.matmul(a, b, out=c)}, repeats=repeats)
    return 2 * size**3 / times["gemm"].median_ms / 1e9


def run(config: Config) -> Iterator[Record]:
    """Yield a record for each case, pass and peer, with the versions that GPU measurements depend on."""
    reason = why_no_gpu() or ("PyTorch is not installed" if find_spec("torch") is None else None)
    if reason:
        sys.exit(f"speed_vs_peers compares methods on a GPU: {reason}")
    import cupy
    import torch

    torch.set_float32_matmul_precision("highest")  # disables TF32
    constants = {"gemm_tflops": gemm_tflops(config.repeats)} | gpu_versions() | versions()
    print(f"bfloat16 matmul of 8192: {constants['gemm_tflops']:.0f} TFLOP/s")
    for case in track(cases(config), "cases"):
        for record in compare(case, config):
            yield record | constants
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()


# Summary of the rows, which are records of a run, or rows of the file


def milliseconds(row: Mapping[str, Any], column: str) -> float | None:
    return float(row[column]) if row.get(column) else None


def by_case(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """Group the rows by case, pass and kernel; each group has one row per peer."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row.get(name, "")) for name in CASE), []).append(row)
    return groups


def rate(row: Mapping[str, Any], column: str) -> float | None:
    """Convert a row's time to TFLOP/s."""
    ms = milliseconds(row, column)
    if ms is None:
        return None
    shape = {"seqlen": int(row["seqlen"]), "batch": int(row["batch"]), "num_heads": int(row["heads"])}
    return flops(row["pass"], row["mask"], **shape, head_dim=int(row["head_dim"])) / ms / 1e9


def over_best(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the best peer's time divided by cuflash's, for the rows of one case."""
    ratios = [float(row["ratio"]) for row in rows if row.get("ratio")]
    return min(ratios, default=None)


def mask_kind(row: Mapping[str, Any]) -> str:
    """Return "full", "causal" or "random blocks": the kinds of mask over which means are computed."""
    return str(row["mask"]) if named_blocks(row["mask"]) is None else "random blocks"


class Lead(NamedTuple):
    """The best peer's time divided by cuflash's in a set of cases; above 1, cuflash is faster."""

    mean: float  # geometric mean
    least: float
    most: float
    num_cases: int
    num_led: int  # number of cases in which cuflash is the fastest


def leads(
    rows: Sequence[Mapping[str, Any]], name: Callable[[Mapping[str, Any]], Hashable]
) -> dict[Hashable, Lead]:
    """Return the lead in each set of cases, grouped by `name`, among the cases with a time of ours and of a peer."""
    ratios: dict[Hashable, list[float]] = {}
    for case in by_case(rows).values():
        best = over_best(case)
        if best is not None:
            ratios.setdefault(name(case[0]), []).append(best)
    return {
        name: Lead(geometric_mean(values), min(values), max(values), len(values), sum(ratio > 1 for ratio in values))
        for name, values in ratios.items()
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and cells: TFLOP/s of each case, and ratios to the matrix product and to the best peer."""
    peers = [name for name in PEERS if any(row["peer"] == name and row.get("peer_ms") for row in rows)]
    header = ["pass", "head_dim", "mask", "seqlen", "kernel", OURS, "of matmul", *peers, "best peer / ours"]
    lines = []
    order = {name: place for place, name in enumerate(WAYS)}
    for case in sorted(
        by_case(rows).values(), key=lambda case: (order[case[0]["pass"]], int(case[0]["head_dim"]))
    ):
        first = case[0]
        ours, peer = rate(first, "cuflash_ms"), {row["peer"]: rate(row, "peer_ms") for row in case}
        gemm = ours / float(first["gemm_tflops"]) if ours else None
        cells = [str(first[name]) for name in ("pass", "head_dim", "mask", "seqlen", "kernel")]
        numbers = [ours, gemm, *(peer.get(name) for name in peers), over_best(case)]
        forms = [".0f", ".2f", *(".0f" for _ in peers), ".2f"]
        lines.append([*cells, *("" if x is None else format(x, form) for x, form in zip(numbers, forms, strict=True))])
    return header, lines


def table(records: list[Record]) -> Table:
    """Tabulate the TFLOP/s of this run."""
    header, lines = summary(records)
    result = Table(title="TFLOP/s")
    for column in header:
        result.add_column(column, justify="left" if column in ("pass", "mask", "kernel") else "right")
    for line in lines:
        result.add_row(*line)
    return result


def plot(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Plot TFLOP/s over length: a panel per pass, mask (full or causal) and head_dim; None if there is only one length.

    Panels with the same head_dim are side by side; if there are several values of head_dim, each has a column.
    """
    rows = [row for row in rows if named_blocks(row["mask"]) is None]
    if len({row["seqlen"] for row in rows}) < 2:
        return None
    panels = sorted({(row["pass"], row["mask"]) for row in rows}, reverse=True)
    head_dims = sorted({int(row["head_dim"]) for row in rows})
    grid = (len(panels), len(head_dims)) if len(head_dims) > 1 else (1, len(panels))
    figure = Figure(figsize=(4 * grid[1], 2.6 * grid[0]), layout="constrained")
    axes = figure.subplots(*grid, squeeze=False, sharex=True).reshape(len(panels), len(head_dims))
    for (line, (way, mask)), (column, head_dim) in itertools.product(enumerate(panels), enumerate(head_dims)):
        panel = axes[line][column]
        shown = [row for row in rows if (row["pass"], row["mask"], int(row["head_dim"])) == (way, mask, head_dim)]
        curves: dict[str, dict[int, float]] = {}
        for row in shown:
            for name, time in ((f"{OURS} {row['kernel']}", "cuflash_ms"), (row["peer"], "peer_ms")):
                tflops = rate(row, time)
                if tflops is not None:
                    curves.setdefault(name, {})[int(row["seqlen"])] = tflops
        ours = sorted(name for name in curves if name.startswith(OURS))
        for name, points in sorted(curves.items()):
            style: dict[str, Any] = {"color": f"C{list(PEERS).index(name)}"} if name in PEERS else {"color": "black"}
            if name in ours:  # one line style for each of our kernels
                style |= {"linewidth": 2, "linestyle": ("-", "--", "-.", ":")[ours.index(name) % 4]}
            panel.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=name, **style)
        panel.set(title=f"{way}, {mask}, head_dim {head_dim}", ylim=(0, None))
        panel.set_xscale("log", base=2)
        panel.title.set_fontsize("medium")
        if curves:
            panel.legend(fontsize="x-small", loc="lower right")
    figure.supxlabel("seqlen")
    figure.supylabel("TFLOP/s")
    return figure


if __name__ == "__main__":
    if any(f"{OURS}: wrong" in record["note"] for record in main(Config, run, table, replacing=(*CASE, "peer"))):
        sys.exit("a result of ours was wrong, and was not timed")
