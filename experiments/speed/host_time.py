"""How long does a warm call occupy the host, for arrays of CuPy, PyTorch and JAX?

    python -m experiments host_time                                          # 10^4 calls per case
    python -m experiments host_time --budget-s 100                           # as many as fit, for a quick look
    python -m experiments host_time --csv rows.csv --libraries cupy cuflash.torch --masks none --tokens 256

It needs an NVIDIA GPU and CuPy. If PyTorch or JAX, or its GPU support, is missing, its rows are left out, and a line
says so. A row is the median over the calls of a case, in microseconds, from the start of a call until it returns.
Between calls the host waits for the device, which is not timed, so that a full queue never delays a call. Calls rotate
over inputs at 64 different addresses. If each call has a new mask, creating it is timed separately, as `mask_us`. An
empty launch of CuPy and PyTorch's scaled_dot_product_attention are timed for comparison. Because a host's clock rate
changes within minutes, empty launches are also timed between the calls of each case: `launch_us` is their median, and
comparisons of two rows divide by it.

Rows of `cupy` are calls of `cuflash.attention` and other functions on CuPy arrays. Rows of `torch` and `jax` are the
same calls on tensors and arrays of these libraries, which are passed by DLPack; `cuflash.torch` and `cuflash.jax` are
the functions of these modules. The time of a vjp is that of the backward pass alone; `out=` is `attention` with this
argument, and `dropout` is `attention` with a new offset in each call. A selector chooses a quarter of the blocks of a
causal call, and builds their index; `vertical_slash` keeps one key and one distance for each block that other selectors
keep per row, and `quest` chooses a quarter of the pages for the last query.

Rows of threads are rounds in which 1 or 8 threads call `cuflash.attention` concurrently, each on its own stream; `us`
is the time of a round divided by the calls of all its threads, so that 10^6 / us is the number of calls per second.
Threads overlap only in launches by CUDA's driver, which run outside Python's global interpreter lock.

Found:  a warm call on CuPy arrays occupies the host for some tens of microseconds; docs/performance.md has the table.

Cost: An hour of a GPU with 10^4 calls per case, minutes with --budget-s 100.
"""

import csv
import datetime
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import cuflash
import numpy as np
from command_line import Parser, check_writable
from cuflash import BlockIndex, masks, patterns, selectors
from cuflash.selectors import Budget
from harness import UNPUBLISHED, atomic_path, why_no_gpu

PLACES = 64
LAUNCH_EACH = 8  # number of calls of a case between two empty launches
THREADS = {"attention in 1 thread": 1, "attention in 8 threads": 8}  # number of threads in a round
CALLS_OF_THREAD = 128  # number of calls per thread in a round
HEADS, KV_HEADS, HEAD_DIM, BLOCK, PAGE = 16, 4, 64, 64, 16
OPERATIONS = (
    "attention", "grouped heads", "out=", "dropout", "attention_vjp", "vjp", "plan.forward", "plan.backward",
    "plan.forward(out=)", "vjp of a bias", "merge", "recall", "BlockIndex.from_mask",
    *THREADS,
)  # fmt: skip
SELECTORS = tuple(
    f"selectors.{name}"
    for name in ("pooled", "antidiagonal", "nsa", "vertical_slash", "quest", "oracle", "local", "random")
)
MASKS = (
    "none", "causal", "same BlockIndex", "new BlockIndex", "new BlockIndex on the device", "new bool array",
    "new BlockPattern", "new Lengths", "new Documents", "causal and new Documents", "same NumPy BlockPattern",
    "same NumPy bool array", "same function", "new bigbird",
)  # fmt: skip
LIBRARIES = ("cupy", "torch", "cuflash.torch", "jax", "cuflash.jax")
COLUMNS = (
    "library", "operation", "mask", "tokens", "us", "low_us", "high_us", "launch_us", "mask_us", "calls", "heads",
    "head_dim", "dtype", "gpu", "cupy", "torch", "jax", "cuflash", "commit", "date",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A call to time.

    `prepare(turn, mask)` creates the arguments of `call`, untimed; `calls` is the number of calls in it.
    """

    library: str
    operation: str
    prepare: Callable[[int, Any], tuple[Any, ...]]
    call: Callable[..., Any]
    takes_mask: bool = True
    calls: int = 1


class Inputs:
    """Arrays of one library at `PLACES` addresses: q, k, v, do, results, and k and v with fewer heads."""

    def __init__(self, tokens: int, send: Callable[[Any], Any]) -> None:
        drawn = np.random.default_rng(0).standard_normal((4, HEADS, tokens, HEAD_DIM), dtype=np.float32)
        host = drawn.astype(np.float16)
        self.places = [tuple(map(send, host)) for _ in range(PLACES)]
        self.narrow = [(q, *(send(host[n, :KV_HEADS]) for n in (1, 2))) for q, *_ in self.places]
        self.outs = [send(np.zeros_like(host[0])) for _ in range(PLACES)]


def cases_by_dlpack(library: str, inputs: Inputs) -> Iterator[Case]:
    """Yield cuflash's calls for NumPy and CuPy users, on arrays of any library."""

    def attention(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        return cuflash.attention(q, k, v, mask=mask, **options)

    # the last plan, keyed by the identity of its mask, which the plan keeps alive
    last: dict[int, tuple[Any, Any]] = {}

    def planned(turn: int, mask: Any) -> tuple[Any, ...]:
        """Return the plan of a mask, created once for all calls with the mask, and the arrays."""
        if id(mask) not in last:
            last.clear()
            last[id(mask)] = mask, cuflash.plan(*inputs.places[turn][:3], mask=mask)
        return last[id(mask)][1], *inputs.places[turn]

    yield Case(library, "attention", lambda turn, mask: (*inputs.places[turn][:3], mask), attention)
    yield Case(library, "grouped heads", lambda turn, mask: (*inputs.narrow[turn], mask), attention)
    if library != "jax":  # JAX arrays are read-only
        yield Case(
            library, "out=", lambda turn, mask: (*inputs.places[turn][:3], mask, inputs.outs[turn]),
            lambda q, k, v, mask, out: attention(q, k, v, mask, out=out),
        )  # fmt: skip
    offsets = count()
    yield Case(
        library, "dropout", lambda turn, mask: (*inputs.places[turn][:3], cuflash.Dropout(0.1, 0, next(offsets))),
        lambda q, k, v, dropout: attention(q, k, v, None, dropout=dropout), takes_mask=False,
    )  # fmt: skip
    yield Case(
        library, "attention_vjp", lambda turn, mask: (*inputs.places[turn][:3], mask),
        lambda q, k, v, mask: cuflash.attention_vjp(q, k, v, mask=mask),
    )  # fmt: skip
    yield Case(
        library, "vjp",
        lambda turn, mask: (cuflash.attention_vjp(*inputs.places[turn][:3], mask=mask)[1], inputs.places[turn][3]),
        lambda vjp, do: vjp(do),
    )  # fmt: skip
    yield Case(library, "plan.forward", planned, lambda ready, q, k, v, do: ready.forward(q, k, v))

    def after_forward(turn: int, mask: Any) -> tuple[Any, ...]:
        ready, q, k, v, do = planned(turn, mask)
        return ready, do, q, k, v, *ready.forward(q, k, v)

    yield Case(library, "plan.backward", after_forward, lambda ready, *arrays: ready.backward(*arrays))
    if library == "cupy":
        yield from cases_beside_attention(inputs, planned)
        yield from cases_of_threads(inputs)
        yield from cases_of_selectors(inputs)


def cases_beside_attention(inputs: Inputs, planned: Callable[[int, Any], tuple[Any, ...]]) -> Iterator[Case]:
    """Yield other calls on CuPy arrays; `planned` returns a plan and q, k, v and do."""
    import cupy

    tokens = inputs.places[0][0].shape[-2]
    bias = cupy.zeros((HEADS, 1, tokens), np.float16)
    halves = masks.Band(0, tokens // 2), masks.Band(None, -1)
    parts = [
        list(zip(*(cuflash.attention(*place[:3], mask=half, return_lse=True) for half in halves)))
        for place in inputs.places[:2]
    ]
    window, pattern = masks.SlidingWindow(tokens // 4, 0), masks.Dense(cupy.ones((tokens, tokens), bool))
    yield Case(
        "cupy", "plan.forward(out=)", lambda turn, mask: (*planned(turn, mask), inputs.outs[turn]),
        lambda ready, q, k, v, do, out: ready.forward(q, k, v, out=out),
    )  # fmt: skip
    yield Case(
        "cupy", "vjp of a bias",
        lambda turn, mask: (
            cuflash.attention_vjp(*inputs.places[turn][:3], bias=bias, wrt="bias")[1], inputs.places[turn][3],
        ),
        lambda vjp, do: vjp(do), takes_mask=False,
    )  # fmt: skip
    yield Case("cupy", "merge", lambda turn, mask: tuple(parts[turn % 2]), cuflash.merge, takes_mask=False)
    yield Case(
        "cupy", "recall", lambda turn, mask: (*inputs.places[turn][:3], window),
        lambda q, k, v, mask: cuflash.study.recall(q, k, v, mask=mask), takes_mask=False,
    )  # fmt: skip
    yield Case(
        "cupy", "BlockIndex.from_mask", lambda turn, mask: (pattern,),
        lambda mask: BlockIndex.from_mask(mask, tokens, tokens, BLOCK), takes_mask=False,
    )  # fmt: skip


def cases_of_threads(inputs: Inputs) -> Iterator[Case]:
    """Yield calls on CuPy arrays from concurrent threads, each with its own stream."""
    import cupy

    def attend(stream: Any, first: int) -> None:
        with stream:
            for turn in range(first, first + CALLS_OF_THREAD):
                cuflash.attention(*inputs.places[turn % PLACES][:3])

    def round_of(threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(attend, streams[:threads], range(0, PLACES, PLACES // threads)):
                pass

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(max(THREADS.values()))]
    for name, threads in THREADS.items():
        yield Case(
            "cupy", name, lambda turn, mask, threads=threads: (threads,), round_of, takes_mask=False,
            calls=threads * CALLS_OF_THREAD,
        )  # fmt: skip


def cases_of_selectors(inputs: Inputs) -> Iterator[Case]:
    """Yield selectors on CuPy arrays, which do not use the masks of the measurement."""
    tokens = inputs.places[0][0].shape[-2]
    few = Budget(top_k=max(1, tokens // BLOCK // 4))
    of_blocks: dict[str, Any] = {"block": BLOCK, "causal": True}
    of_pages = {"budget": Budget(top_k=max(1, tokens // PAGE // 4)), "page_size": PAGE}
    options = {
        "selectors.vertical_slash": of_blocks | {"vertical": few, "slash": few},
        "selectors.quest": of_pages,
    }
    for name in SELECTORS:
        select = partial(getattr(selectors, name.partition(".")[2]), **options.get(name, of_blocks | {"budget": few}))
        first = tokens - 1 if name == "selectors.quest" else 0  # quest chooses only for the last query

        def inputs_from(turn: int, mask: Any, first: int = first) -> tuple[Any, Any]:
            q, k = inputs.places[turn][:2]
            return q[:, first:], k

        yield Case("cupy", name, inputs_from, select, takes_mask=False)


def cases_of_torch(inputs: Inputs) -> Iterator[Case]:
    import cuflash.torch
    import torch

    attention = cuflash.torch.attention
    leaves = [tuple(tensor.detach().requires_grad_() for tensor in place[:3]) for place in inputs.places]

    def forward(q: Any, k: Any, v: Any, mask: Any, out: Any = None, dropout: Any = None) -> Any:
        with torch.no_grad():
            return attention(q, k, v, mask=mask, out=out, dropout=dropout)

    yield Case("cuflash.torch", "attention", lambda turn, mask: (*inputs.places[turn][:3], mask), forward)
    yield Case("cuflash.torch", "grouped heads", lambda turn, mask: (*inputs.narrow[turn], mask), forward)
    yield Case(
        "cuflash.torch", "out=", lambda turn, mask: (*inputs.places[turn][:3], mask, inputs.outs[turn]), forward
    )
    offsets = count()
    yield Case(
        "cuflash.torch", "dropout",
        lambda turn, mask: (*inputs.places[turn][:3], None, None, cuflash.Dropout(0.1, 0, next(offsets))), forward,
        takes_mask=False,
    )  # fmt: skip
    yield Case(
        "cuflash.torch", "attention_vjp", lambda turn, mask: (*leaves[turn], mask),
        lambda q, k, v, mask: attention(q, k, v, mask=mask),
    )  # fmt: skip
    yield Case(
        "cuflash.torch", "vjp",
        lambda turn, mask: (attention(*leaves[turn], mask=mask), leaves[turn], inputs.places[turn][3]),
        torch.autograd.grad,
    )  # fmt: skip


def cases_of_sdpa(inputs: Inputs) -> Iterator[Case]:
    """Yield PyTorch's own attention, without a mask."""
    import torch

    sdpa = torch.nn.functional.scaled_dot_product_attention
    batches = [tuple(tensor[None].detach() for tensor in place) for place in inputs.places]
    leaves = [tuple(tensor.detach().requires_grad_() for tensor in place[:3]) for place in batches]

    def forward(q: Any, k: Any, v: Any) -> Any:
        with torch.no_grad():
            return sdpa(q, k, v)

    yield Case("PyTorch's SDPA", "attention", lambda turn, mask: batches[turn][:3], forward, takes_mask=False)
    yield Case("PyTorch's SDPA", "attention_vjp", lambda turn, mask: leaves[turn], sdpa, takes_mask=False)
    yield Case(
        "PyTorch's SDPA", "vjp", lambda turn, mask: (sdpa(*leaves[turn]), leaves[turn], batches[turn][3]),
        torch.autograd.grad, takes_mask=False,
    )  # fmt: skip


def cases_of_jax(inputs: Inputs) -> Iterator[Case]:
    import cuflash.jax
    import jax

    attention = cuflash.jax.attention
    yield Case(
        "cuflash.jax", "attention", lambda turn, mask: (*inputs.places[turn][:3], mask),
        lambda q, k, v, mask: attention(q, k, v, mask=mask),
    )  # fmt: skip
    yield Case(
        "cuflash.jax", "grouped heads", lambda turn, mask: (*inputs.narrow[turn], mask),
        lambda q, k, v, mask: attention(q, k, v, mask=mask),
    )  # fmt: skip
    yield Case(
        "cuflash.jax", "attention_vjp", lambda turn, mask: (mask, *inputs.places[turn][:3]),
        lambda mask, q, k, v: jax.vjp(partial(attention, mask=mask), q, k, v),
    )  # fmt: skip

    def pulled(turn: int, mask: Any) -> tuple[Any, ...]:
        _, vjp = jax.vjp(partial(attention, mask=mask), *inputs.places[turn][:3])
        return vjp, inputs.places[turn][3]

    yield Case("cuflash.jax", "vjp", pulled, lambda vjp, do: vjp(do))


def empty_launch() -> Callable[..., Any]:
    """Return a function that launches a kernel that does nothing."""
    import cupy

    return partial(cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing"), (1,), (32,), ())


def makers_of_masks(tokens: int, send: Callable[[Any], Any]) -> dict[str, Callable[[int], Any]]:
    """Return functions that create a mask by call number; masks keep about half of the blocks, and the diagonal."""
    blocks = -(-tokens // BLOCK)
    rng = np.random.default_rng(1)
    grids = [(rng.random((blocks, blocks)) < 0.5) | np.eye(blocks, dtype=bool) for _ in range(PLACES)]
    on_device = [send(each) for each in grids]
    rows = [np.arange(tokens)[:, None] >= np.arange(tokens) - 8 * number for number in range(4)]
    dense = [send(each) for each in rows]
    same = BlockIndex.from_blocks(grids[0], tokens, tokens, BLOCK)
    causal = masks.Causal()
    lengths = [send(np.array(rng.integers(1, tokens + 1), np.int32)) for _ in range(PLACES)]
    ids = [send(np.sort(rng.integers(0, 8, tokens, dtype=np.int32))) for _ in range(PLACES)]
    pattern = masks.BlockPattern(grids[0], BLOCK)

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return abs(i - j) < 2 * BLOCK

    return {
        "none": lambda turn: None,
        "causal": lambda turn: causal,
        "same BlockIndex": lambda turn: same,
        "new BlockIndex": lambda turn: BlockIndex.from_blocks(grids[turn % PLACES], tokens, tokens, BLOCK),
        "new BlockIndex on the device": lambda turn: BlockIndex.from_blocks(
            on_device[turn % PLACES], tokens, tokens, BLOCK
        ),
        "new bool array": lambda turn: dense[turn % 4] | False,
        "new BlockPattern": lambda turn: masks.BlockPattern(on_device[turn % PLACES], BLOCK),
        "new Lengths": lambda turn: masks.Lengths(kv=lengths[turn % PLACES]),
        "new Documents": lambda turn: masks.Documents(ids[turn % PLACES]),
        "causal and new Documents": lambda turn: causal & masks.Documents(ids[turn % PLACES]),
        "same NumPy BlockPattern": lambda turn: pattern,
        "same NumPy bool array": lambda turn: rows[0],
        "same function": lambda turn: near,
        "new bigbird": lambda turn: patterns.bigbird(tokens, block=BLOCK),
    }


def timed(
    case: Case,
    mask_of: Callable[[int], Any],
    wait: Callable[[], None],
    launch: Callable[[], Any],
    calls: int,
    budget_s: float,
) -> dict[str, Any]:
    """Time a case in microseconds: median and quartiles, and the medians of empty launches and of creating a mask."""
    spent, listing, launches = [], [], []
    started = time.perf_counter()
    for turn in range(-5, max(1, calls // case.calls)):
        if turn % LAUNCH_EACH == 0:
            wait()
            begin = time.perf_counter()
            launch()
            launches.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        mask = mask_of(turn)
        listing.append(time.perf_counter() - begin)
        arguments = case.prepare(turn % PLACES, mask)
        wait()
        begin = time.perf_counter()
        result = case.call(*arguments)
        ended = time.perf_counter()
        if turn >= 0:
            spent.append((ended - begin) / case.calls)
        del result, arguments
        if turn >= 2 and time.perf_counter() - started > budget_s:
            break
    wait()
    low, median, high = np.percentile(spent, (25, 50, 75)) * 1e6
    return {
        "us": f"{median:.2f}", "low_us": f"{low:.2f}", "high_us": f"{high:.2f}",
        "launch_us": f"{statistics.median(launches) * 1e6:.2f}", "mask_us": f"{statistics.median(listing) * 1e6:.2f}",
        "calls": len(spent) * case.calls,
    }  # fmt: skip


def senders(libraries: list[str]) -> dict[str, Callable[[Any], Any]]:
    """Return the functions that copy a NumPy array to the GPU, one for each installed library."""
    import cupy

    send_by_library: dict[str, Callable[[Any], Any]] = {"cupy": cupy.asarray}
    if {"torch", "cuflash.torch"} & set(libraries):
        try:
            import torch

            if not torch.cuda.is_available():
                raise ImportError("PyTorch finds no GPU")
            send_by_library["torch"] = lambda array: torch.from_numpy(np.array(array)).cuda()
        except ImportError as error:
            print(f"no rows of PyTorch: {error}")
    if {"jax", "cuflash.jax"} & set(libraries):
        try:
            import jax

            device = jax.devices("gpu")[0]
            send_by_library["jax"] = lambda array: jax.device_put(array, device)
        except (ImportError, RuntimeError) as error:
            print(f"no rows of JAX: {error}")
    return send_by_library


def cases(libraries: list[str], library: str, inputs: Inputs) -> Iterator[Case]:
    if library in libraries:
        yield from cases_by_dlpack(library, inputs)
    if library == "torch" and "cuflash.torch" in libraries:
        yield from cases_of_torch(inputs)
    if library == "torch":
        yield from cases_of_sdpa(inputs)
    if library == "jax" and "cuflash.jax" in libraries:
        yield from cases_of_jax(inputs)


def versions() -> dict[str, str]:
    """Return the versions on which a measurement depends."""
    import importlib.metadata as metadata

    import cupy

    facts = {"cupy": cupy.__version__, "cuflash": cuflash.__version__, "date": datetime.date.today().isoformat()}
    for name in ("torch", "jax"):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = ""
    facts["gpu"] = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
    git = ("git", "-C", str(Path(__file__).parents[2]), "rev-parse", "--short", "HEAD")
    try:
        facts["commit"] = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        facts["commit"] = ""
    return facts


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the current rows atomically."""
    with atomic_path(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--csv", type=Path, default=UNPUBLISHED / "host_time.csv", help="output file")
    parser.add_argument("--calls", type=int, default=10000, help="maximum number of calls per case")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="total seconds for all cases")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 8192])
    for name, known in (("libraries", LIBRARIES), ("operations", (*OPERATIONS, *SELECTORS)), ("masks", MASKS)):
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=list(known))
    chosen = parser.parse_args()
    if min(chosen.calls, *chosen.tokens) < 1 or not chosen.budget_s > 0:
        parser.error("calls, tokens and budget-s must be positive")
    check_writable(chosen.csv.parent)
    if reason := why_no_gpu():
        sys.exit(f"host_time times calls on a GPU: {reason}")

    import cupy

    wait, launch, common = cupy.cuda.runtime.deviceSynchronize, empty_launch(), versions()
    common |= {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float16"}
    plan = [(tokens, name, send) for tokens in chosen.tokens for name, send in senders(chosen.libraries).items()]
    deadline = time.perf_counter() + chosen.budget_s
    rows: list[dict[str, Any]] = []

    def row(case: Case, mask: str, mask_of: Callable[[int], Any], tokens: int, budget_s: float) -> None:
        try:
            times = timed(case, mask_of, wait, launch, chosen.calls, budget_s)
        except (cuflash.UnsupportedProblem, TypeError) as error:
            print(f"{case.library}, {case.operation}, {mask}: {error}")
            return
        named = {"library": case.library, "operation": case.operation, "mask": mask, "tokens": tokens}
        rows.append(named | times | common)
        write(chosen.csv, rows)
        print(*named.values(), times["us"], "us", flush=True)

    alone = Case("an empty launch of CuPy", "launch", lambda turn, mask: (), launch)
    row(alone, "none", lambda turn: None, 0, min(2.0, chosen.budget_s / 20))
    for number, (tokens, name, send) in enumerate(plan):
        makers = makers_of_masks(tokens, send)
        every = [
            (case, mask)
            for case in cases(chosen.libraries, name, Inputs(tokens, send))
            for mask in chosen.masks
            if case.operation in chosen.operations and (mask == "none" or case.takes_mask)
        ]
        part = (deadline - time.perf_counter()) / (len(plan) - number)
        ends = time.perf_counter() + part
        for index, (case, mask) in enumerate(every):
            row(case, mask, makers[mask], tokens, max(0.0, (ends - time.perf_counter()) / (len(every) - index)))
    print(f"{common['gpu']}: {chosen.csv}")


if __name__ == "__main__":
    main()
