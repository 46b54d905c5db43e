"""Do calls of many threads disturb each other, take even times, and keep bounded memory?

    python -m experiments load                                    # 100,000 calls on the cpu executor, half by threads
    python -m experiments load --gpu
    python -m experiments load --gpu --calls 20000 --seconds 15   # a short look

Threads, each on a stream of its own, make unlike calls in drawn order: attention, and its gradients, of several dtypes,
lengths, masks, score functions and sinks. The results of every eighth call are compared bit for bit with those of the
same call alone. A row of the table is for a number of threads, or for calls with a mask that is new each time. If there
are several GPUs, threads run on all of them once more.

`us` is the median host time of a call, averaged over the kinds of calls; `p99` is the 99th percentile of the time of a
call over the median of its kind. `cpu_us` and `cpu_p99` are the same for the processor time of the thread, which leaves
out when it waits for Python's global lock. `host_mib` and `device_mib` are what the process and CuPy's pool grew in the
last three quarters of the calls.

A repeated call takes no lock of the library, as tests/runtime/test_call_cache.py proves; the row `NumPy alone` shows
how long as many threads wait for each other that only evaluate NumPy's formulas.

Expect: no wrong bits, a p99 of at most 2 in one thread, and no growth; exit status 0, or 1 if bits are wrong.
Found:  no wrong bits, and growth of at most 1 MiB on the host and 8 MiB of device memory. A call of one thread takes at
most 1.7 times its median in 99 of 100 cases on the cpu executor, and 2.0 times on an H200. Eight threads wait for
Python's lock: 3.1 times their median on two cores, where NumPy alone reaches 2.1, and 30 times on one H200 or two; 1.7
and 2.7 times in processor time.

Cost: A minute of a GPU; three minutes of two cores.
"""

import contextlib
import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cuflash
import numpy as np
from cuflash import BlockIndex, masks
from cuflash.compiler import nvrtc
from cuflash.executors import gpu
from harness import Record, main, one_thread, why_no_gpu
from rich.table import Table

KEY = ("executor", "gpu", "work")  # the GPU is the machine's
LENGTHS = tuple(range(10, 120, 10))
CHECKED = 8  # every eighth call is compared
WAITS = 64  # calls of a thread after which it waits for its stream, untimed, so that no queue is full
STATM = Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a run; the defaults are those of the published table."""

    gpu: bool = False
    calls: int = field(default=50_000, metadata={"help": "calls of all threads together, for each number of threads"})
    threads: tuple[int, ...] = (1, 8)
    new_masks: int = field(default=1200, metadata={"help": "calls with a new mask each"})
    seconds: float = field(default=120.0, metadata={"help": "when a row ends, however many calls it has"})

    def __post_init__(self) -> None:
        if min(self.calls, self.new_masks, self.seconds, *self.threads) <= 0:
            raise ValueError("calls, threads, new_masks and seconds must be positive")


@dataclass(frozen=True)
class Kind:
    """A call of one kind: its arrays, and its results alone."""

    call: Callable[[], Sequence[Any]]
    expected: Sequence[Any]


class Host:
    """NumPy and the cpu executor."""

    xp: Any = np
    executor = "cpu"

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a thread has a stream of its own."""
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Return immediately: calls have already ended."""

    def compile(self, plans: Sequence[cuflash.Plan]) -> None:
        """Return immediately: there is nothing to compile."""

    def count_wrong(self, ours: Any, alone: Any, wrong: Any) -> None:
        """Add the number of bytes that differ to an array."""
        wrong[0] += np.count_nonzero(ours.view(np.uint8) != alone.view(np.uint8))

    def pool_bytes(self) -> int:
        return 0


class Device(Host):
    """CuPy and the gpu executor on one GPU."""

    executor = "gpu"

    def __init__(self, number: int) -> None:
        import cupy

        self.xp, self._device = cupy, cupy.cuda.Device(number)
        # One kernel for results of all shapes; `!=` and `any` would compile many.
        count = "if (ours != alone) atomicAdd(&wrong[0], 1ull)"
        self._count = cupy.ElementwiseKernel("uint8 ours, uint8 alone", "raw uint64 wrong", count, "count_wrong")

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        with self._device, self.xp.cuda.Stream(non_blocking=True):
            yield

    def wait(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def compile(self, plans: Sequence[cuflash.Plan]) -> None:
        """Compile the kernels of all plans in parallel."""
        specs = {spec for plan in plans for spec in plan._plan.specs.values()}
        nvrtc.precompile(specs, gpu.current_device().compute_capability)

    def count_wrong(self, ours: Any, alone: Any, wrong: Any) -> None:
        self._count(ours.view(np.uint8).ravel(), alone.view(np.uint8).ravel(), wrong)

    def pool_bytes(self) -> int:
        with self._device:
            self._device.synchronize()
            return int(self.xp.get_default_memory_pool().total_bytes())


def kinds(where: Host) -> list[Kind]:
    """Return unlike calls, with the results that each has alone."""
    rng, calls, every = np.random.default_rng(0), [], []
    for number, length in enumerate(LENGTHS):
        blocks = BlockIndex.from_blocks(np.tri(-(-length // 32), dtype=bool), length, length, 32)
        of_masks: list[Any] = [None, masks.Causal(), masks.SlidingWindow(31, 0), masks.Lengths(kv=length - 9), blocks]
        for dtype in ("float16", "float32"):
            heads = 2 + number % 2
            q, k, v, do = map(
                where.xp.asarray, rng.standard_normal((4, heads, length, 32 + 32 * (number % 2))).astype(dtype)
            )
            options = {"mask": of_masks[(number + heads) % len(of_masks)], "deterministic": True}
            options |= {"softcap": 30.0} if number % 4 == 1 else {}
            options |= {"sink": where.xp.zeros(heads, np.float32)} if number % 4 == 2 else {}
            calls.append(((q, k, v, do), options))
    where.compile([cuflash.plan(q, k, v, **options) for (q, k, v, _), options in calls])
    for (q, k, v, do), options in calls:

        def forward(q: Any = q, k: Any = k, v: Any = v, options: Any = options) -> Sequence[Any]:
            o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
            return o, lse

        def both(q: Any = q, k: Any = k, v: Any = v, do: Any = do, options: Any = options) -> Sequence[Any]:
            o, vjp = cuflash.attention_vjp(q, k, v, **options)
            return o, *vjp(do)

        for call in (forward, both):
            call()
            every.append(Kind(call, [each.copy() for each in call()]))
    where.wait()
    return every


def formulas_alone() -> list[Kind]:
    """Return calls of NumPy alone, which take about as long as those of the library, as a control."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((length, 32)).astype(np.float32) for length in LENGTHS]

    def formulas(x: Any) -> Sequence[Any]:
        for _ in range(60):
            np.exp(x @ x.T - 1).sum(axis=-1)
        return ()

    return [Kind(lambda x=x: formulas(x), ()) for x in arrays]


class Worker:
    """A thread's calls in drawn order, their times by kind, and the number of bytes that are wrong."""

    def __init__(self, where: Host, every: Sequence[Kind], seed: int, calls: int, deadline: float) -> None:
        self._where, self._every, self._calls, self._deadline = where, every, calls, deadline
        self._order = np.random.default_rng(seed).integers(len(every), size=calls).tolist()
        self.times: list[tuple[int, float, float]] = []
        self.num_checked = self.num_wrong = 0

    def run(self, part: slice) -> None:
        """Make a part of the calls on a new stream."""
        with self._where.stream():
            wrong = self._where.xp.zeros(1, np.uint64)
            for turn, number in enumerate(self._order[part]):
                if time.monotonic() > self._deadline:
                    break
                kind = self._every[number]
                before, cpu_before = time.perf_counter(), time.thread_time()
                results = kind.call()
                cpu, wall = time.thread_time() - cpu_before, time.perf_counter() - before
                self.times.append((number, wall, cpu))
                if turn % CHECKED == 0:
                    self.num_checked += 1
                    for ours, alone in zip(results, kind.expected, strict=True):
                        self._where.count_wrong(ours, alone, wrong)
                if turn % WAITS == 0:
                    self._where.wait()
            self.num_wrong += int(wrong[0])


def number_of_gpus() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def resident_bytes() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * 4096 if STATM.exists() else 0


def in_threads(config: Config, places: Sequence[tuple[Host, Sequence[Kind]]], threads: int) -> Record:
    """Return the row of a number of threads, which take the places, each with its calls, in turn."""
    calls, deadline = max(4, config.calls // threads), time.monotonic() + config.seconds
    workers = [Worker(*places[seed % len(places)], seed, calls, deadline) for seed in range(threads)]

    def pool_bytes() -> int:
        return sum(where.pool_bytes() for where, _ in places)

    def together(part: slice) -> None:
        running = [threading.Thread(target=worker.run, args=(part,)) for worker in workers]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    together(slice(0, calls // 4))
    host, device = resident_bytes(), pool_bytes()
    bytes_of_time = sys.getsizeof((0, 0.0, 0.0)) + 2 * sys.getsizeof(0.0) + 8  # of one entry of `Worker.times`
    together(slice(calls // 4, calls))
    growth = resident_bytes() - host
    times = [each for worker in workers for each in worker.times]
    growth -= bytes_of_time * max(0, len(times) - threads * (calls // 4))
    on_gpus = f", {len(places)} GPUs" * (len(places) > 1)
    row = {"work": f"{threads} thread{'s' * (threads > 1)}{on_gpus}", "calls": len(times)} | spread(times)
    row |= {"checked": sum(worker.num_checked for worker in workers), "wrong": sum(w.num_wrong for w in workers)}
    return row | {"host_mib": growth / 2**20, "device_mib": (pool_bytes() - device) / 2**20}


def spread(times: Sequence[tuple[int, float, float]]) -> Record:
    """Return the medians of times in microseconds, averaged over kinds, and 99th percentiles over medians."""
    row: Record = {}
    for place, prefix in ((1, ""), (2, "cpu_")):
        by_kind: dict[int, list[float]] = {}
        for each in times:
            by_kind.setdefault(each[0], []).append(each[place])
        medians = {kind: statistics.median(of_kind) for kind, of_kind in by_kind.items()}
        quotients = [each[place] / medians[each[0]] for each in times if medians[each[0]]]
        row[f"{prefix}us"] = 1e6 * statistics.fmean(medians.values())
        row[f"{prefix}p99"] = float(np.quantile(quotients, 0.99)) if quotients else None
    return row


def with_new_masks(config: Config, where: Host) -> Record:
    """Return the row of calls whose mask is new each time."""
    rng, xp = np.random.default_rng(0), where.xp
    q, k, v, do = map(xp.asarray, rng.standard_normal((4, 2, 256, 32)).astype(np.float16))
    blocks = rng.random((config.new_masks, 16, 16)) < 0.6
    times: list[tuple[int, float, float]] = []
    host = device = 0
    for turn in range(config.new_masks):
        if turn == config.new_masks // 4:
            host, device = resident_bytes(), where.pool_bytes()
        before, cpu_before = time.perf_counter(), time.thread_time()
        mask = BlockIndex.from_blocks(blocks[turn], 256, 256, 16)
        _, vjp = cuflash.attention_vjp(q, k, v, mask=mask)
        vjp(do)
        times.append((0, time.perf_counter() - before, time.thread_time() - cpu_before))
        where.wait()
    row = {"work": "new masks", "calls": config.new_masks} | spread(times)
    return row | {
        "host_mib": (resident_bytes() - host) / 2**20, "device_mib": (where.pool_bytes() - device) / 2**20,
    }  # fmt: skip


def run(config: Config) -> Iterator[Record]:
    """Yield the rows of the numbers of threads, and that of new masks."""
    if config.gpu and (reason := why_no_gpu()):
        sys.exit(f"load --gpu needs a GPU: {reason}")
    wheres = [Device(number) for number in range(number_of_gpus())] if config.gpu else [Host()]
    wrong = 0
    with contextlib.nullcontext() if config.gpu else one_thread():  # threads of BLAS would wait for each other
        places = []
        for where in wheres:
            with where.stream():
                places.append((where, kinds(where)))
        groups = [(1, threads) for threads in config.threads]
        groups += [(len(places), max(config.threads))] * (len(places) > 1)
        for num_places, threads in groups:
            row = in_threads(config, places[:num_places], threads)
            wrong += row["wrong"]
            yield {"executor": wheres[0].executor, "kinds": len(places[0][1])} | row
        if not config.gpu:
            row = in_threads(config, [(Host(), formulas_alone())], max(config.threads))
            yield {"executor": "cpu", "kinds": len(LENGTHS)} | row | {"work": f"{row['work']}, NumPy alone"}
        yield {"executor": wheres[0].executor} | with_new_masks(config, wheres[0])
    if wrong:
        sys.exit(f"{wrong} bytes of results differ from those of calls alone")


def table(rows: Sequence[Record]) -> Table:
    """Tabulate times and growth."""
    columns = ("us", "p99", "cpu_us", "cpu_p99", "host_mib", "device_mib")
    shown = Table("executor", "work", "calls", "kinds", "checked", "wrong", *columns)
    for row in rows:
        texts = ("" if row.get(name) is None else f"{float(row[name]):.2f}" for name in columns)
        named = (str(row.get(name, "")) for name in ("executor", "work", "calls", "kinds", "checked", "wrong"))
        shown.add_row(*named, *texts)
    return shown


if __name__ == "__main__":
    main(Config, run, table, replacing=lambda config: KEY)
