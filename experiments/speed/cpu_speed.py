"""How fast is the cpu executor against its BLAS, plain NumPy and PyTorch, and how much memory does it take?

    python -m experiments cpu_speed        # pip install torch adds the PyTorch rows

Times are medians of alternating calls in one process, float32, head_dim 64; the table names the denominators of ratios.
PyTorch runs in a process of its own, in pairs of short runs that alternate with cuflash's: times are those of the
fastest call, and the ratio is the lower quartile over the pairs of PyTorch's fastest time divided by cuflash's.
Memory is the increase of the peak resident set during the call, minus the results, in a separate process.

Expect: the forward pass takes a small multiple of its two matrix products, block-sparse time is proportional to the
density, and memory is O(seqlen).
Found:  on Zen 3, the forward pass takes 1.3 to 1.4 times its two matrix products from 512 tokens on, and 2.0 times at
256. It is as fast as plain NumPy at 256 tokens, and faster from 512 tokens on. Its speed is 0.59 to 0.63 of PyTorch's
from 512 tokens on, and that of the backward pass 0.78 to 0.85, because exp takes longer in NumPy. Time over density is
1.15, 1.19, 1.19 and 1.24 at densities of 0.5, 0.25, 0.125 and 0.1, and 1.17, 1.15, 1.48 and 1.40 for the backward
pass, because products of short tiles are slower, queries and results are moved once for any density, and threads wait
for Python's interpreter lock. Published with --seconds 2 --pairs 6, at real-time priority on a shared machine.

Cost: Minutes on two cores.
"""

import concurrent.futures
import functools
import importlib.util
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cuflash
import numpy as np
from cuflash import masks
from harness import Record, Timing, main, time_alternately, track
from rich.table import Table

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shapes of the published run."""

    num_heads: int = 8
    seqlen: int = 4096
    head_dim: int = 64
    densities: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.1)
    block: int = 128
    short_seqlens: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    memory_seqlen: int = 65536
    window: int = 1023
    seconds: float = 6.0  # seconds for each group of alternating calls
    pairs: int = 12  # pairs of runs of cuflash and PyTorch

    def __post_init__(self) -> None:
        if min(self.num_heads, self.seqlen, self.head_dim, self.block, self.memory_seqlen, *self.short_seqlens) < 1:
            raise ValueError("num_heads, head_dim, lengths and block must be positive")
        if not all(0 < density <= 1 for density in self.densities) or self.densities[0] != 1:
            raise ValueError(f"densities must lie in (0, 1] and begin with 1, the base; got {self.densities}")


def draw(num_heads: int, seqlen: int, head_dim: int) -> Arrays:
    """Draw q, k, v and do of shape (num_heads, seqlen, head_dim) from the normal distribution, float32."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((num_heads, seqlen, head_dim), np.float32) for _ in range(4))


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Compute attention in plain NumPy: full matrices, in place if that costs nothing."""
    s = q @ k.swapaxes(-1, -2)
    s *= np.float32(q.shape[-1] ** -0.5)
    s -= s.max(-1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(-1, keepdims=True)
    return s @ v


def backward(q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, mask: Any = None) -> Callable[[], object]:
    """Return the backward call; its forward pass has already run."""
    plan = cuflash.plan(q, k, v, mask=mask)
    o, lse = plan.forward(q, k, v)
    return lambda: plan.backward(do, q, k, v, o, lse)


def check(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """Assert that the first 64 queries of the timed forward pass are within the bound of the reference."""
    o = cuflash.attention(q, k, v)[:, :64]
    error = np.abs(o - cuflash.reference.attention(q[:, :64], k, v)[0])
    if not (error <= cuflash.error_bound(q[:, :64], k, v).o).all():
        raise AssertionError(f"the forward to be timed is wrong by {error.max():.3g}")


def record(measure: str, timing: Timing, over: Timing | None = None, ratio_of: str = "", **shape: Any) -> Record:
    ratio = {"ratio": timing.median_ms / over.median_ms, "ratio_of": ratio_of} if over else {}
    return {"measure": measure, **shape, "ms": timing.median_ms, "spread_ms": timing.spread_ms, **ratio}


def run_dense(config: Config) -> list[Record]:
    """Time dense calls, the two matrix products that they need, and plain NumPy with all BLAS threads."""
    records = []
    for seqlen in track(sorted({*config.short_seqlens, config.seqlen}), "dense"):
        arrays = draw(config.num_heads, seqlen, config.head_dim)
        # Not all of them alternate: OpenBLAS's threads spin for a while after the products that NumPy distributes.
        groups = cuflash_calls(*arrays), numpy_calls(*arrays)
        ours, others = (time_alternately(each, repeats=200, budget_s=config.seconds) for each in groups)
        times = ours | others
        shape = {"seqlen": seqlen, "num_heads": config.num_heads, "head_dim": config.head_dim, "density": 1.0}
        for name in times:
            base = {"forward": "two matmuls", "backward": "forward"}.get(name, name.split()[-1])
            over = times.get(base)
            records.append(record(name, times[name], over, f"over {base}", **shape))
    return records


def cuflash_calls(q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray) -> dict[str, Callable[[], object]]:
    """Return the cuflash calls, after checking their results."""
    check(q, k, v)
    return {"forward": lambda: cuflash.attention(q, k, v), "backward": backward(q, k, v, do)}


Case = tuple[str, int, int, int, bool]  # the pass, number of heads, seqlen, head_dim, and whether the mask is causal


@functools.cache
def peer_call(library: str, case: Case) -> Callable[[], object]:
    """Return a call of cuflash or PyTorch, which has run twice."""
    name, num_heads, seqlen, head_dim, causal = case
    q, k, v, do = (x[None] for x in draw(num_heads, seqlen, head_dim))
    if library == "PyTorch":
        call = torch_call(q, k, v, do, causal, name)
    elif name == "forward":
        call = functools.partial(cuflash.attention, q, k, v, causal=causal)
    else:
        call = backward(q, k, v, do, cuflash.masks.Causal() if causal else None)
    for _ in range(2):
        call()
    return call


def fastest(library: str, case: Case, calls: int) -> float:
    """Return the seconds of the fastest of some calls."""
    call, seconds = peer_call(library, case), []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def run_peers(config: Config) -> list[Record]:
    """Time calls of cuflash and PyTorch in pairs, each library in a process of its own; empty without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return []
    lengths = sorted({*config.short_seqlens, config.seqlen})
    cases = [(name, config.num_heads, n, config.head_dim, causal)
             for name in ("forward", "backward") for causal in (False, True) for n in lengths]  # fmt: skip
    records, context = [], multiprocessing.get_context("spawn")
    with (concurrent.futures.ProcessPoolExecutor(1, context) as ours,
          concurrent.futures.ProcessPoolExecutor(1, context) as others):  # fmt: skip
        for case in track(cases, "PyTorch"):
            name, num_heads, seqlen, head_dim, causal = case
            calls = max(2, min(20, (2 << 20) // seqlen**2))
            pairs = []
            for _ in range(config.pairs):
                pair = []
                for pool, library in ((others, "PyTorch"), (ours, "cuflash")):
                    time.sleep(0.02)  # the threads of the other library stop spinning
                    pair.append(pool.submit(fastest, library, case, calls).result())
                pairs.append(pair)
            speeds = [torch / own for torch, own in pairs]
            speed = statistics.quantiles(speeds, n=4)[0] if len(speeds) > 1 else speeds[0]
            shape = {"seqlen": seqlen, "num_heads": num_heads, "head_dim": head_dim}
            shape["density"] = (seqlen + 1) / (2 * seqlen) if causal else 1.0
            torch_ms, own_ms = (min(times) * 1e3 for times in zip(*pairs))
            pass_name = f"{name}{', causal' if causal else ''}"
            records.append({"measure": f"PyTorch {version('torch')} {pass_name}", **shape, "ms": torch_ms})
            ratio = {"ratio": speed, "ratio_of": "PyTorch's time over this, lower quartile of pairs"}
            records.append({"measure": f"{pass_name}, paired", **shape, "ms": own_ms, **ratio})
    return records


def numpy_calls(q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray) -> dict[str, Callable[[], object]]:
    """Return calls of the forward pass's two matrix products, into existing memory, and of attention in plain NumPy."""
    s = np.empty((*q.shape[:2], k.shape[1]), np.float32)
    return {
        "two matmuls": lambda: np.matmul(q, k.swapaxes(-1, -2), out=s) @ v,
        "plain NumPy forward": lambda: plain_attention(q, k, v),
    }


def torch_call(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, causal: bool, name: str
) -> Callable[[], object]:
    """Return a call of PyTorch's scaled_dot_product_attention, or of its gradients, on the same data."""
    import torch  # imported on demand, since it takes two seconds and 200 MB

    sdpa = torch.nn.functional.scaled_dot_product_attention
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    cotangent = torch.from_numpy(do)

    def forward() -> object:
        with torch.no_grad():
            return sdpa(*tensors, is_causal=causal)

    if name == "forward":
        return forward
    o = sdpa(*tensors, is_causal=causal)
    return lambda: torch.autograd.grad(o, tensors, cotangent, retain_graph=True)


def run_density(config: Config) -> list[Record]:
    """Time random blocks: time relative to all blocks, divided by density; 1 means proportional."""
    q, k, v, do = draw(config.num_heads, config.seqlen, config.head_dim)
    calls: dict[str, dict[float, Callable[[], object]]] = {"block-sparse forward": {}, "block-sparse backward": {}}
    exact_density = {}
    grid = -(-config.seqlen // config.block)
    for density in config.densities:
        blocks = np.zeros((grid, grid), bool)
        blocks.flat[np.random.default_rng(1).permutation(grid * grid)[: round(density * grid * grid)]] = True
        mask = masks.BlockPattern(blocks, config.block)
        exact_density[density] = float(blocks.mean())
        calls["block-sparse forward"][density] = lambda mask=mask: cuflash.attention(q, k, v, mask=mask)
        calls["block-sparse backward"][density] = backward(q, k, v, do, mask)
    records = []
    for name, by_density in track(list(calls.items()), "densities"):
        times = time_alternately({str(d): call for d, call in by_density.items()}, repeats=200, budget_s=config.seconds)
        for density in config.densities:
            shape = {"seqlen": config.seqlen, "num_heads": config.num_heads, "head_dim": config.head_dim}
            row = record(name, times[str(density)], **shape, density=exact_density[density], block=config.block)
            speed = row["ms"] / times[str(config.densities[0])].median_ms
            records.append(row | {"ratio": speed / exact_density[density], "ratio_of": "over all blocks * density"})
    return records


def run_memory(config: Config) -> list[Record]:
    """Measure peak memory of one head, each case in a fresh process so that no earlier peak hides it."""
    cases = [(name, direction) for name in ("causal", "window") for direction in ("forward", "backward")]
    records = []
    for name, direction in track(cases, "memory"):
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            mib, data_mib = pool.submit(peak_mib, config, name, direction == "backward").result()
        shape = {"seqlen": config.memory_seqlen, "num_heads": 1, "head_dim": config.head_dim}
        over = {"mib": mib, "ratio": mib / data_mib, "ratio_of": "over q, k, v and results"}
        records.append({"measure": f"peak memory, {name}, {direction}", **shape, **over})
    return records


def peak_mib(config: Config, name: str, is_backward: bool) -> tuple[float, float]:
    """Return the peak resident MiB of a call without its arguments and results, and the MiB of these arrays."""
    arguments: dict[str, Any] = {"causal": {"causal": True}, "window": {"window": (config.window, 0)}}[name]

    def call(q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray) -> Arrays:
        if not is_backward:
            return cuflash.attention(q, k, v, **arguments, return_lse=True)
        o, vjp = cuflash.attention_vjp(q, k, v, **arguments)
        return (o, *vjp(do))

    call(*draw(1, 512, config.head_dim))  # allocates the buffers of imports and of BLAS before the measurement
    arrays = draw(1, config.memory_seqlen, config.head_dim)
    before = _status_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak; see `man 5 proc`
    results = call(*arrays)
    beyond = _status_kib("VmHWM") - before
    bytes_out, bytes_in = (sum(x.nbytes for x in xs) for xs in (results, arrays))
    return beyond / 2**10 - bytes_out / 2**20, (bytes_in + bytes_out) / 2**20


def _status_kib(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise OSError(f"/proc/self/status has no {name}: peak memory is measured on Linux only")
    return int(match[1])


def run(config: Config) -> list[Record]:
    """Return the records of all measurements."""
    return run_dense(config) + run_peers(config) + run_density(config) + run_memory(config)


def table(records: list[Record]) -> Table:
    """Tabulate the measurements."""
    result = Table(title="cpu executor, float32")
    for column in ("measure", "seqlen", "density", "ms", "± ms", "MiB", "ratio", "of what"):
        result.add_column(column, justify="left" if column in ("measure", "of what") else "right")
    forms = {"density": ".3f", "ms": ".2f", "spread_ms": ".2f", "mib": ".1f", "ratio": ".2f"}
    for row in records:
        columns = ("measure", "seqlen", "density", "ms", "spread_ms", "mib", "ratio", "ratio_of")
        result.add_row(*(format(row[name], forms.get(name, "")) if name in row else "" for name in columns))
    return result


if __name__ == "__main__":
    main(Config, run, table)
