"""What does attention to 16 blocks that each query chooses cost, compared with dense attention and with block lists?

    python -m experiments chosen_speed                                    # a check, then 4096 and 16384 tokens
    python -m experiments chosen_speed --seqlens 4096 --groups 1,4,16     # other groups of heads
    python -m experiments chosen_speed --regimes random,0.6,0.8,sink --seqlens 4096,16384,32768

It needs an NVIDIA GPU of compute capability 8.0 or newer, and CuPy. The dtype is bfloat16, head_dim is 128, and 64
query heads are in groups of `groups`. Attention is causal: every query attends its own block of 64 keys and `chosen` -
1 blocks before it. Regimes: "random" blocks; "0.8", in which each query keeps 80 % of the blocks of the previous query;
"sink", random blocks of which one is block 0. First, results and gradients of a few random problems are compared with
the specification in float64, within their bounds.

Rows: `chosen` joins lists on the device in each call; `dense` is causal attention without lists; `listed` visits the
same blocks by an index with blocks of (1, 64), with the sm90 kernels, not counting the time to build the index.
`distinct` is the ratio of the distinct blocks of a tile's queries to the blocks of one query.

Found:  on an H200 with 4096 tokens and random blocks, the forward pass takes 0.24 times the time with lists of (1, 64),
and the backward pass 0.36 times; relative to dense causal attention, they take 2.3 and 1.6 times as long.

Cost: 90 seconds of a GPU, 40 of them for compiling.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from cuflash import masks
from cuflash.testing import Structure, assert_within_bounds
from harness import Record, gpu_versions, main, time_on_device, why_no_gpu
from rich.table import Table

HEADS, DIM, BLOCK = 64, 128, 64
REGIMES = ("random", "sink")  # in addition to shares such as "0.8"
_LISTED_TO = 16384  # tokens; building an index for more takes too long


@dataclass(frozen=True, kw_only=True)
class Config:
    """Lengths, groups of heads and regimes; the defaults are the quick form."""

    seqlens: tuple[int, ...] = (4096, 16384)
    groups: tuple[int, ...] = (16,)
    regimes: tuple[str, ...] = ("random", "0.8")
    chosen: int = 16
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("seqlens", "groups", "chosen", "repeats"):
            value = getattr(self, name)
            if min(value if isinstance(value, tuple) else (value,), default=0) < 1:
                raise ValueError(f"{name} must be positive")
        if any(HEADS % group for group in self.groups):
            raise ValueError(f"groups must divide {HEADS} heads")
        if any(regime not in REGIMES and not 0 <= _share(regime) < 1 for regime in self.regimes):
            raise ValueError(f"regimes are {', '.join(REGIMES)} and shares from 0 to below 1")


def _share(regime: str) -> float:
    try:
        return float(regime)
    except ValueError:
        return 1.0


def lists_of(seqlen: int, num_lists: int, chosen: int, regime: str) -> np.ndarray[Any, Any]:
    """Draw the blocks of each query, int32 [lists, seqlen, chosen]: first its own, then earlier ones, padded with -1.

    >>> lists_of(130, 1, 3, "sink")[0, [0, 70, 129]].tolist()
    [[0, -1, -1], [1, 0, -1], [2, 0, 1]]
    """
    rng, own = np.random.default_rng(0), np.arange(seqlen) // BLOCK
    score = rng.random((num_lists, seqlen, own[-1] + 1), np.float32)
    score[..., np.arange(own[-1] + 1) > own[:, None]] = -1
    if regime == "sink":
        score[..., 0] = 2
    score[:, np.arange(seqlen), own] = 4
    if regime not in REGIMES:  # a query keeps this share of the blocks of the previous query
        is_kept = rng.random(score.shape, np.float32) < float(regime)
        for i in range(1, seqlen):
            last = np.argpartition(-score[:, i - 1], min(chosen, own[-1]), axis=-1)[:, :chosen]
            was_chosen = np.zeros((num_lists, own[-1] + 1), bool)
            np.put_along_axis(was_chosen, last, np.take_along_axis(score[:, i - 1], last, -1) >= 0, axis=-1)
            is_other = score[:, i] < 3
            score[:, i] += 2 * (was_chosen & is_kept[:, i] & is_other)
    best = np.argsort(-score, axis=-1, kind="stable")[..., :chosen]
    return np.where(np.take_along_axis(score, best, -1) < 0, -1, best).astype(np.int32)


def check() -> None:
    """Compare results of drawn problems with the specification in float64."""
    import cupy

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
        (o, lse), vjp = cuflash.attention_vjp(q, k, v, mask=mask.to(cupy.asarray), return_lse=True)
        results = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *vjp(do))))
        again = dict(zip(("dq", "dk", "dv"), vjp(do)))
        assert all(bool((results[name] == again[name]).all()) for name in again), "gradients repeat bit for bit"
        share = assert_within_bounds(example, **{name: cupy.asnumpy(each) for name, each in results.items()})
        print(f"group {group}: {share:.3f} of the bounds at most", flush=True)


def calls_of(seqlen: int, group: int, lists: Any, is_listed: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of a pass, the name of a method, and the call."""
    import cupy

    def normal(heads: int) -> Any:
        return cupy.random.standard_normal((heads, seqlen, DIM), dtype=np.float32).astype(ml_dtypes.bfloat16)

    q, do, k, v = normal(HEADS), normal(HEADS), normal(HEADS // group), normal(HEADS // group)
    ways: dict[str, dict[str, Any]] = {
        "chosen": {"mask": masks.ChosenBlocks(cupy.asarray(lists), BLOCK)}, "dense": {},
    }  # fmt: skip
    if is_listed:
        index = masks.ChosenBlocks(lists, BLOCK).index(seqlen, num_heads=HEADS)
        ways["listed"] = {"mask": index, "kernel": "sm90"}
    for way, options in ways.items():

        def forward(options: dict[str, Any] = options) -> Any:
            return cuflash.attention(q, k, v, causal=True, **options)

        yield f"forward {way}", forward
        _, vjp = cuflash.attention_vjp(q, k, v, causal=True, **options)
        yield f"backward {way}", lambda vjp=vjp: vjp(do)


def run(config: Config) -> Iterator[Record]:
    """Check results, then yield the rows of all cases."""
    if reason := why_no_gpu():
        sys.exit(f"chosen_speed times kernels on a GPU: {reason}")
    import cupy

    check()
    is_hopper = cupy.cuda.Device().compute_capability == "90"
    for seqlen in config.seqlens:
        for group in config.groups:
            for number, regime in enumerate(config.regimes):
                lists = lists_of(seqlen, HEADS // group, config.chosen, regime)
                distinct = masks.ChosenBlocks(lists[:1], BLOCK).distinct(queries=max(1, 64 // group))
                calls = dict(calls_of(seqlen, group, lists, is_hopper and number == 0 and seqlen <= _LISTED_TO))
                times = time_on_device(calls, repeats=config.repeats, warmup=2)
                for name, timing in times.items():
                    which, _, way = name.partition(" ")
                    record = {
                        "seqlen": seqlen, "group": group, "regime": regime, "pass": which, "way": way,
                        "ms": timing.median_ms, "spread_ms": timing.spread_ms, "distinct": distinct,
                        "of_dense": timing.median_ms / times[f"{which} dense"].median_ms,
                    }  # fmt: skip
                    print(*record.values(), flush=True)
                    yield record | gpu_versions()
                cupy.get_default_memory_pool().free_all_blocks()


def table(records: list[Record]) -> Table:
    """Tabulate the times of this run."""
    times, columns = Table(title="Blocks that each query chooses"), (
        "seqlen", "group", "regime", "pass", "way", "ms", "of_dense", "distinct"
    )  # fmt: skip
    for column in columns:
        times.add_column(column)
    for record in records:
        times.add_row(*(f"{x:.4g}" if isinstance(x := record[column], float) else str(x) for column in columns))
    return times


if __name__ == "__main__":
    main(Config, run, table, replacing=("gpu", "seqlen", "group", "regime", "pass", "way"))
