"""What does attention to 16 blocks that each query chooses cost, compared with dense attention and another library?

    python -m experiments chosen_speed                                    # a check, then 4096, 16384 and 32768 tokens
    python -m experiments chosen_speed --groups 1,4,16 --seqlens 16384    # other groups of heads
    python -m experiments chosen_speed --chosen 4,16,64 --seqlens 16384   # other numbers of blocks
    python -m experiments chosen_speed --regimes random,0.6,0.8,0.9,sink  # other overlaps of neighbors

It needs an NVIDIA GPU of compute capability 8.0 or newer, and CuPy. The dtype is bfloat16, head_dim is 128, and 64
query heads are in groups of `groups`. Attention is causal: every query attends its own block of 64 keys and `chosen` -
1 blocks before it. Regimes: "random" blocks; "0.8", in which each query keeps each block of the previous query with a
probability of 0.8; "sink", random blocks that include block 0. The blocks are drawn on the device. First, results and
gradients of a few random problems are compared with the specification in float64, within their bounds.

Rows: `chosen` joins lists on the device in each call; `sm80` does the same with the kernels for GPUs before Hopper;
`dense` is causal attention without lists; `fla` is flash-linear-attention's `parallel_nsa`, if it is installed and
supports the group size. `distinct` is the ratio of the distinct blocks of a tile's queries to the blocks of one query.
Rows of `listed` were measured before these kernels existed: they visit the same blocks in an index with blocks of (1,
64).

Found:  on an H200 with 4096 tokens and random blocks, before kernels for Hopper existed, the forward pass takes 0.24
times as long as with lists of (1, 64), and the backward pass 0.36 times; relative to dense causal attention, they take
2.3 and 1.6 times as long.

Cost: 90 seconds of a GPU, 40 of them for compiling.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from cuflash import masks
from cuflash.testing import Structure, assert_within_bounds
from harness import Record, gpu_versions, main, time_on_device, why_no_gpu
from matplotlib.figure import Figure
from rich.table import Table

HEADS, DIM, BLOCK = 64, 128, 64
REGIMES = ("random", "sink")  # in addition to probabilities such as "0.8"
MOST_CHOSEN = 64
_SAMPLED = 4096  # number of last queries whose distinct blocks are counted
# A thread draws the lists of a head, one query after another.
_DRAW = """
extern "C" __global__ void draw(int* blocks, int seqlen, int chosen, float share, int has_sink) {
  unsigned long long state = 0x9E3779B97F4A7C15ull * (blockIdx.x + 1);
  const auto next = [&] {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<unsigned>(state >> 32);
  };
  int row[MOST], length = 0;
  blocks += static_cast<long long>(blockIdx.x) * seqlen * chosen;
  for (int query = 0; query < seqlen; ++query, blocks += chosen) {
    const int own = query / BLOCK, wanted = own < chosen ? own + 1 : chosen, previous = length;
    length = 0;
    const auto add = [&](int block) {
      for (int x = 0; x < length; ++x)
        if (row[x] == block) return;
      row[length++] = block;
    };
    int kept[MOST], num_kept = 0;
    for (int x = 0; x < previous; ++x)
      if (row[x] != own && next() < share * 4294967040.0f) kept[num_kept++] = row[x];
    add(own);
    if (has_sink && length < wanted) add(0);
    for (int x = 0; x < num_kept && length < wanted; ++x) add(kept[x]);
    for (int block = 0; own < chosen && block < own; ++block) add(block);
    while (length < wanted) add(next() % own);
    for (int x = 0; x < chosen; ++x) blocks[x] = x < length ? row[x] : -1;
  }
}
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Lengths, groups of heads, numbers of blocks and regimes; the defaults are the published form."""

    seqlens: tuple[int, ...] = (4096, 16384, 32768)
    groups: tuple[int, ...] = (16,)
    regimes: tuple[str, ...] = ("random", "0.8")
    chosen: tuple[int, ...] = (16,)
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("seqlens", "groups", "chosen", "repeats"):
            value = getattr(self, name)
            if min(value if isinstance(value, tuple) else (value,), default=0) < 1:
                raise ValueError(f"{name} must be positive")
        if max(self.chosen) > MOST_CHOSEN:
            raise ValueError(f"chosen must be at most {MOST_CHOSEN}")
        if any(HEADS % group for group in self.groups):
            raise ValueError(f"groups must divide {HEADS} heads")
        if any(regime not in REGIMES and not 0 <= _share(regime) < 1 for regime in self.regimes):
            raise ValueError(f"regimes are {', '.join(REGIMES)} and shares from 0 to below 1")


def _share(regime: str) -> float:
    try:
        return float(regime)
    except ValueError:
        return 1.0


def lists_of(seqlen: int, num_lists: int, chosen: int, regime: str) -> Any:
    """Draw the blocks of each query on the device, int32 [lists, seqlen, chosen]: its own, earlier ones, then -1."""
    import cupy

    blocks = cupy.empty((num_lists, seqlen, chosen), np.int32)
    text = _DRAW.replace("MOST", str(MOST_CHOSEN + 1)).replace("BLOCK", str(BLOCK))
    share = np.float32(0 if regime in REGIMES else float(regime))
    numbers = np.int32(seqlen), np.int32(chosen), share, np.int32(regime == "sink")
    cupy.RawKernel(text, "draw")((num_lists,), (1,), (blocks, *numbers))
    return blocks


def check() -> None:
    """Compare results of random problems with the specification in float64, for all kernels that this GPU can run."""
    import cupy

    kernels = ("sm90", "sm80") if _is_hopper() else ("sm80",)
    for number, group in enumerate((1, 4, 12, 16, 80)):
        rng = np.random.default_rng(number)
        closed = (masks.Causal("bottom_right"), masks.Lengths(kv=300), masks.SlidingWindow(200, 0, "bottom_right"))
        blocks = rng.integers(-1, 6, (2, 150, 3))
        mask = masks.ChosenBlocks(blocks, BLOCK) & closed[number % 3]
        structure = Structure(
            q_batch=(), k_batch=(), v_batch=(), num_heads=2 * group, num_kv_heads=2, seqlen_q=150, seqlen_kv=340,
            head_dim=DIM, value_dim=DIM, dtype="bfloat16", mask=mask,
        )  # fmt: skip
        example = structure.example()
        example = example.but(product_dtype=example.q.dtype, dlse=None)
        q, k, v, do = map(cupy.asarray, (example.q, example.k, example.v, example.do))
        for kernel in kernels:
            options: dict[str, Any] = {"mask": mask.to(cupy.asarray), "return_lse": True, "kernel": kernel}
            (o, lse), vjp = cuflash.attention_vjp(q, k, v, **options)
            results = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *vjp(do))))
            again = dict(zip(("dq", "dk", "dv"), vjp(do)))
            assert all(bool((results[name] == again[name]).all()) for name in again), "gradients repeat bit for bit"
            share = assert_within_bounds(example, **{name: cupy.asnumpy(each) for name, each in results.items()})
            print(f"group {group}, {kernel}: {share:.3f} of the bounds at most", flush=True)


def _is_hopper() -> bool:
    import cupy

    return bool(cupy.cuda.Device().compute_capability == "90")


def calls_of(seqlen: int, group: int, lists: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a name for each pass and method, and the call."""
    import cupy

    def normal(heads: int) -> Any:
        return cupy.random.standard_normal((heads, seqlen, DIM), dtype=np.float32).astype(ml_dtypes.bfloat16)

    q, do, k, v = normal(HEADS), normal(HEADS), normal(HEADS // group), normal(HEADS // group)
    mask = masks.ChosenBlocks(lists, BLOCK)
    ways: dict[str, dict[str, Any]] = {"chosen": {"mask": mask}, "dense": {}}
    if _is_hopper():
        ways["sm80"] = {"mask": mask, "kernel": "sm80"}
    for way, options in ways.items():

        def forward(options: dict[str, Any] = options) -> Any:
            return cuflash.attention(q, k, v, causal=True, **options)

        yield f"forward {way}", forward
        _, vjp = cuflash.attention_vjp(q, k, v, causal=True, **options)
        yield f"backward {way}", lambda vjp=vjp: vjp(do)
    if find_spec("fla") and group >= 16 and group & (group - 1) == 0:
        yield from _calls_of_fla(q, k, v, do, lists)


def _calls_of_fla(*arrays: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the passes of flash-linear-attention's kernels, without autograd, and compare their result with ours."""
    import cupy
    import torch
    from fla.ops.nsa.parallel import parallel_nsa_bwd, parallel_nsa_fwd

    *tensors, blocks = (torch.from_dlpack(each.view(np.uint16) if each.dtype != np.int32 else each) for each in arrays)
    q, k, v, do = (each.view(torch.bfloat16).transpose(0, 1)[None].contiguous() for each in tensors)
    options = {
        "block_indices": blocks.transpose(0, 1)[None].long().contiguous(), "block_counts": blocks.shape[-1],
        "block_size": BLOCK, "scale": DIM**-0.5,
    }  # fmt: skip
    o, lse = parallel_nsa_fwd(q=q, k=k, v=v, **options)
    ours = cuflash.attention(*arrays[:3], causal=True, mask=masks.ChosenBlocks(arrays[-1], BLOCK))
    error = abs(cupy.from_dlpack(o[0].transpose(0, 1).float().contiguous()) - ours.astype(np.float32)).max()
    assert error < 0.05, f"both libraries attend the same keys; their results differ by {error}"
    yield "forward fla", lambda: parallel_nsa_fwd(q=q, k=k, v=v, **options)
    yield "backward fla", lambda: parallel_nsa_bwd(q=q, k=k, v=v, o=o, lse=lse, do=do, **options)


def run(config: Config) -> Iterator[Record]:
    """Check results, then yield the rows of all cases."""
    if reason := why_no_gpu():
        sys.exit(f"chosen_speed times kernels on a GPU: {reason}")
    import cupy

    check()
    cases = product(config.seqlens, config.groups, config.chosen)
    for seqlen, group, chosen in cases:
        for regime in config.regimes:
            lists = lists_of(seqlen, HEADS // group, chosen, regime)
            last = masks.ChosenBlocks(lists[:1, -_SAMPLED:], BLOCK)
            distinct = last.distinct(queries=max(1, 64 // group))
            times = time_on_device(dict(calls_of(seqlen, group, lists)), repeats=config.repeats, warmup=2)
            for name, timing in times.items():
                which, _, way = name.partition(" ")
                record = {
                    "seqlen": seqlen, "group": group, "chosen": chosen, "regime": regime, "pass": which, "way": way,
                    "ms": timing.median_ms, "spread_ms": timing.spread_ms, "distinct": distinct,
                }  # fmt: skip
                for other in ("dense", "fla"):
                    with suppress(KeyError):
                        record[f"of_{other}"] = timing.median_ms / times[f"{which} {other}"].median_ms
                print(*record.values(), flush=True)
                yield record | gpu_versions()
            cupy.get_default_memory_pool().free_all_blocks()


def table(records: list[Record]) -> Table:
    """Tabulate the times of this run."""
    times, columns = Table(title="Blocks that each query chooses"), (
        "seqlen", "group", "chosen", "regime", "pass", "way", "ms", "of_dense", "of_fla", "distinct"
    )  # fmt: skip
    for column in columns:
        times.add_column(column)
    for record in records:
        cells = (record.get(column, "") for column in columns)
        times.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells))
    return times


def plot(records: list[Record]) -> Figure:
    """Plot the times of each method over the distinct blocks of a tile, and over the fraction of chosen blocks."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    for column, which in enumerate(("forward", "backward")):
        of_pass = [record for record in records if record["pass"] == which]
        for row, (label, x_of) in enumerate({
            "distinct blocks of a tile, of those of a query": lambda record: record["distinct"],
            "share of the blocks that a query chooses": lambda record: record["chosen"] * BLOCK / record["seqlen"],
        }.items()):  # fmt: skip
            panel = axes[row][column]
            for way, seqlen in dict.fromkeys((record["way"], record["seqlen"]) for record in of_pass):
                points = sorted(
                    (x_of(record), record["ms"]) for record in of_pass
                    if (record["way"], record["seqlen"]) == (way, seqlen)
                )  # fmt: skip
                panel.plot(*zip(*points), marker="o", label=f"{way}, {seqlen}")
            panel.set(xlabel=label, ylabel=f"{which} ms", xscale="linear" if row == 0 else "log", yscale="log")
        axes[0][column].legend(fontsize="x-small")
    return figure


if __name__ == "__main__":
    main(Config, run, table, plot, replacing=("gpu", "seqlen", "group", "chosen", "regime", "pass", "way"))
