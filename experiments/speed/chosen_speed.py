"""What does attention to 16 blocks that each query chooses cost, compared with dense attention and other libraries?

    python -m experiments chosen_speed                                 # a check, then 4096, 16384 and 32768 tokens
    python -m experiments chosen_speed --groups 1 --seqlens 16384      # other groups of heads
    python -m experiments chosen_speed --chosen 16,4,8,32,64           # other numbers of blocks
    python -m experiments chosen_speed --regimes random,0.6,0.9,sink   # other overlaps of neighbours

It needs an NVIDIA GPU of compute capability 8.0 or newer, and CuPy. The dtype is bfloat16, head_dim is 128, and 64
query heads are in groups of `groups`. Attention is causal: every query attends its own block of 64 keys and `chosen` -
1 blocks before it. Regimes: "random" blocks; "0.8", in which each query keeps each block of the previous query with a
probability of 0.8; "sink", random blocks of which one is block 0. The blocks are drawn on the device. The first of
`chosen` is timed for every length, group and regime; the others for the first group and regime, at the middle length.
First, results and gradients of a few random problems are compared with the specification in float64, within their
bounds.

Rows: `chosen` joins lists on the device in each call, and so does `sm80`, by the kernels for GPUs before Hopper;
`dense` is causal attention without lists. Other libraries, where they are installed: `fla` is flash-linear-attention's
`parallel_nsa`, `nsa-triton` is `topk_sparse_attention` of XunhaoLai's native-sparse-attention, both with the same
lists; `flash-moba` chooses blocks itself, and differently for each query head. If a library does not serve a case, a
row says why. `distinct` is the ratio of the distinct blocks of a tile's queries to the blocks of one query. `host_us`
is the time of the host for a call with a new mask, of 512 tokens, whose launches are cached.

Found:  on an H200 with random blocks and groups of 16 heads, the forward pass takes 0.44, 0.57 and 0.59 times the time
of flash-linear-attention with 4096, 16384 and 32768 tokens; the backward pass takes 0.32, 0.43 and 0.46 times. If
neighbors share blocks with probability 0.8, it is 0.34, 0.33 and 0.31, and 0.29, 0.32 and 0.32 times. The backward pass
of groups of 4 takes 0.51 times that of dense attention with 16384 tokens, and 0.22 with 32768.

Cost: 150 seconds of a GPU, 80 of them for compiling.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from cuflash import masks
from cuflash.testing import Structure, assert_within_bounds
from harness import Record, gpu_versions, main, time_on_device, why_no_gpu
from matplotlib.figure import Figure
from peers import Unavailable
from rich.table import Table

Calls = Iterator[tuple[str, Callable[[], Any]]]  # names of passes, and calls
HEADS, DIM, BLOCK = 64, 128, 64
REGIMES = ("random", "sink")  # in addition to probabilities such as "0.8"
MOST_CHOSEN = 64
HOST_TOKENS, HOST_CALLS = 512, 100
_SAMPLED = 4096  # queries at the end whose distinct blocks are counted
# A thread draws the lists of a head, query after query.
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
    groups: tuple[int, ...] = (16, 4)
    regimes: tuple[str, ...] = ("random", "0.8", "0.9")
    chosen: tuple[int, ...] = (16, 4, 64)
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

    @property
    def cases(self) -> list[tuple[int, int, str, int]]:
        """The length, group, regime and number of blocks of each case."""
        middle = sorted(self.seqlens)[len(self.seqlens) // 2]
        others = [(middle, self.groups[0], self.regimes[0], number) for number in self.chosen[1:]]
        return [*product(self.seqlens, self.groups, self.regimes, self.chosen[:1]), *others]


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


def check(groups: tuple[int, ...]) -> None:
    """Compare results of drawn problems with the specification in float64, for all kernels that this GPU has."""
    import cupy

    kernels = ("sm90", "sm80") if _is_hopper() else ("sm80",)
    for number, group in enumerate(dict.fromkeys((*groups, 12))):
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
            options["deterministic"] = group < 8  # larger groups repeat by default
            (o, lse), vjp = cuflash.attention_vjp(q, k, v, **options)
            results = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *vjp(do))))
            again = dict(zip(("dq", "dk", "dv"), vjp(do)))
            share = assert_within_bounds(example, **{name: cupy.asnumpy(each) for name, each in results.items()})
            for name, each in again.items():
                assert bool((results[name] == each).all()), f"{name} of group {group} on {kernel} repeats bit for bit"
            print(f"group {group}, {kernel}: {share:.3f} of the bounds at most", flush=True)


def _is_hopper() -> bool:
    import cupy

    return bool(cupy.cuda.Device().compute_capability == "90")


def _normal(heads: int, seqlen: int) -> Any:
    import cupy

    return cupy.random.standard_normal((heads, seqlen, DIM), dtype=np.float32).astype(ml_dtypes.bfloat16)


def calls_of(arrays: tuple[Any, ...], lists: Any) -> Calls:
    """Yield the passes of this library, with lists that each forward pass joins."""
    q, k, v, do = arrays
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


def _tensors(arrays: tuple[Any, ...], lists: Any) -> tuple[Any, ...]:
    """Return PyTorch's tensors of the same contents: q, k, v and do [tokens, heads, columns], lists [tokens, ...]."""
    import torch

    shared = (torch.from_dlpack(each.view(np.uint16)).view(torch.bfloat16) for each in arrays)
    return *(each.transpose(0, 1).contiguous() for each in shared), torch.from_dlpack(lists).transpose(0, 1)


def _require_same(o: Any, arrays: tuple[Any, ...], lists: Any) -> None:
    """Require that o [tokens, heads, columns] of another library attends the same keys as this library."""
    import cupy

    ours = cuflash.attention(*arrays[:3], causal=True, mask=masks.ChosenBlocks(lists, BLOCK)).astype(np.float32)
    error = abs(cupy.from_dlpack(o.detach().transpose(0, 1).float().contiguous()) - ours).max()
    assert error < 0.05, f"both libraries attend the same keys; their results differ by {error}"


def calls_of_fla(arrays: tuple[Any, ...], lists: Any) -> Calls:
    """Yield the passes of flash-linear-attention's kernels, without autograd."""
    from fla.ops.nsa.parallel import parallel_nsa_bwd, parallel_nsa_fwd

    group = arrays[0].shape[0] // arrays[1].shape[0]
    if group < 16 or group & (group - 1):
        raise Unavailable("groups must be powers of two from 16 on")
    *tensors, blocks = _tensors(arrays, lists)
    q, k, v, do = (each[None] for each in tensors)
    options = {
        "block_indices": blocks[None].long().contiguous(), "block_counts": blocks.shape[-1], "block_size": BLOCK,
        "scale": DIM**-0.5,
    }  # fmt: skip
    o, lse = parallel_nsa_fwd(q=q, k=k, v=v, **options)
    _require_same(o[0], arrays, lists)
    yield "forward fla", lambda: parallel_nsa_fwd(q=q, k=k, v=v, **options)
    yield "backward fla", lambda: parallel_nsa_bwd(q=q, k=k, v=v, o=o, lse=lse, do=do, **options)


def _calls_of_autograd(name: str, attend: Callable[[], Any], inputs: tuple[Any, ...], do: Any) -> Calls:
    import torch

    def forward() -> Any:
        with torch.no_grad():
            return attend()

    o = attend()
    yield f"forward {name}", forward
    yield f"backward {name}", lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)


def _offsets(seqlen: int) -> Any:
    import torch

    return torch.tensor([0, seqlen], dtype=torch.int32, device="cuda")


def calls_of_nsa_triton(arrays: tuple[Any, ...], lists: Any) -> Calls:
    """Yield the passes of XunhaoLai's Triton kernels."""
    from native_sparse_attention.ops import topk_sparse_attention

    *tensors, do, blocks = _tensors(arrays, lists)
    inputs = tuple(each.requires_grad_() for each in tensors)
    options = blocks.transpose(0, 1).int().contiguous(), BLOCK, _offsets(lists.shape[1]), DIM**-0.5
    _require_same(topk_sparse_attention(*inputs, *options), arrays, lists)
    yield from _calls_of_autograd("nsa-triton", lambda: topk_sparse_attention(*inputs, *options), inputs, do)


def calls_of_flash_moba(arrays: tuple[Any, ...], lists: Any) -> Calls:
    """Yield the passes of FlashMoBA, which chooses as many blocks for each query head itself."""
    from flash_moba import flash_moba_varlen_func

    *tensors, do, _ = _tensors(arrays, lists)
    inputs, seqlen = tuple(each.requires_grad_() for each in tensors), lists.shape[1]
    options = *[_offsets(seqlen)] * 2, seqlen, seqlen, BLOCK, lists.shape[-1]
    yield from _calls_of_autograd("flash-moba", lambda: flash_moba_varlen_func(*inputs, *options), inputs, do)


OTHERS: Mapping[str, Callable[[tuple[Any, ...], Any], Calls]] = {
    "fla": calls_of_fla, "nsa-triton": calls_of_nsa_triton, "flash-moba": calls_of_flash_moba
}  # fmt: skip


def calls_of_others(arrays: tuple[Any, ...], lists: Any) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Return the passes of other libraries that serve a case, after a call of each, and why others do not."""
    import cupy

    calls, absent = {}, {}
    for name, calls_of_other in OTHERS.items():
        try:
            of_other = dict(calls_of_other(arrays, lists))
            for call in of_other.values():
                call()
            cupy.cuda.get_current_stream().synchronize()
            calls |= of_other
        except AssertionError:
            raise
        except Exception as error:  # of its compiler, its checks, or the import
            absent[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"
    return calls, absent


def rows_of_case(seqlen: int, group: int, regime: str, chosen: int, repeats: int) -> Iterator[Record]:
    """Time all ways of a case, and yield their rows."""
    lists = lists_of(seqlen, HEADS // group, chosen, regime)
    distinct = masks.ChosenBlocks(lists[:1, -_SAMPLED:], BLOCK).distinct(queries=max(1, 64 // group))
    arrays = tuple(_normal(heads, seqlen) for heads in (HEADS, HEADS // group, HEADS // group, HEADS))
    others, absent = calls_of_others(arrays, lists)
    times = time_on_device({**dict(calls_of(arrays, lists)), **others}, repeats=repeats, warmup=2)
    case = {"seqlen": seqlen, "group": group, "chosen": chosen, "regime": regime}
    for name, timing in times.items():
        which, _, way = name.partition(" ")
        ms = timing.median_ms
        record = case | {
            "pass": which, "way": way, "ms": ms, "spread_ms": timing.spread_ms, "distinct": distinct, "note": "",
        }  # fmt: skip
        for other in ("dense", "fla"):
            with suppress(KeyError):
                record[f"of_{other}"] = ms / times[f"{which} {other}"].median_ms
        yield record
    for way, reason in absent.items():
        yield case | {"pass": "both", "way": way, "distinct": distinct, "note": reason}


def host_rows(group: int) -> Iterator[Record]:
    """Yield the host's median times of repeated calls with new masks, while the device has no other work."""
    import cupy

    lists = lists_of(HOST_TOKENS, HEADS // group, 4, "random")
    q, k, v, do = (_normal(heads, HOST_TOKENS) for heads in (HEADS, HEADS // group, HEADS // group, HEADS))
    stream = cupy.cuda.get_current_stream()

    def forward() -> Any:
        return cuflash.attention(q, k, v, causal=True, mask=masks.ChosenBlocks(lists, BLOCK))

    def gradients() -> Any:
        return cuflash.attention_vjp(q, k, v, causal=True, mask=masks.ChosenBlocks(lists, BLOCK))[1](do)

    for which, call in (("forward", forward), ("forward and backward", gradients)):
        seconds = []
        for _ in range(HOST_CALLS):
            stream.synchronize()
            begin = time.perf_counter()
            result = call()
            seconds.append(time.perf_counter() - begin)
            del result
        yield {
            "seqlen": HOST_TOKENS, "group": group, "chosen": 4, "regime": "random", "pass": which, "way": "host",
            "host_us": statistics.median(seconds) * 1e6,
        }  # fmt: skip


def run(config: Config) -> Iterator[Record]:
    """Check results, then yield the rows of all cases."""
    if reason := why_no_gpu():
        sys.exit(f"chosen_speed times kernels on a GPU: {reason}")
    import cupy

    check(config.groups)
    for record in host_rows(config.groups[0]):
        print(*record.values(), flush=True)
        yield record | gpu_versions()
    for case in config.cases:
        for record in rows_of_case(*case, config.repeats):
            print(*record.values(), flush=True)
            yield record | gpu_versions()
        cupy.get_default_memory_pool().free_all_blocks()


def table(records: list[Record]) -> Table:
    """Tabulate the times of this run."""
    times, columns = Table(title="Blocks that each query chooses"), (
        "seqlen", "group", "chosen", "regime", "pass", "way", "ms", "of_dense", "of_fla", "distinct", "host_us", "note"
    )  # fmt: skip
    for column in columns:
        times.add_column(column)
    for record in records:
        cells = (record.get(column, "") for column in columns)
        times.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells))
    return times


def plot(records: list[Record]) -> Figure:
    """Draw the times of each way over the distinct blocks of a tile, and over the share of blocks that are chosen."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes, timed = figure.subplots(2, 2), [record for record in records if record.get("ms")]
    first = [(record["group"], record["chosen"]) for record in timed][:1]
    for column, which in enumerate(("forward", "backward")):
        of_pass = [record for record in timed if record["pass"] == which]
        for row, (label, x_of, of_panel) in enumerate((
            ("distinct blocks of a tile, of those of a query", lambda record: record["distinct"],
             [record for record in of_pass if (record["group"], record["chosen"]) in first]),
            ("share of the blocks that a query chooses", lambda record: record["chosen"] * BLOCK / record["seqlen"],
             [record for record in of_pass if record["regime"] == "random" and record["group"] in dict(first)]),
        )):  # fmt: skip
            panel = axes[row][column]
            for way, seqlen in dict.fromkeys((record["way"], record["seqlen"]) for record in of_panel):
                points = sorted(
                    (x_of(record), record["ms"]) for record in of_panel
                    if (record["way"], record["seqlen"]) == (way, seqlen)
                )  # fmt: skip
                panel.plot(*zip(*points), marker="o", label=f"{way}, {seqlen}")
            panel.set(xlabel=label, ylabel=f"{which} ms", xscale="linear" if row == 0 else "log", yscale="log")
        axes[0][column].legend(fontsize="x-small")
    return figure


if __name__ == "__main__":
    main(Config, run, table, plot, replacing=("gpu", "seqlen", "group", "chosen", "regime", "pass", "way"))
