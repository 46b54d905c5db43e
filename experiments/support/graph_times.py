"""Calls captured into CUDA graphs by CuPy and by PyTorch, timed in replays and as called; sizes of decode steps."""

import statistics
import time
from collections.abc import Callable
from typing import Any

Call = Callable[[], Any]


def captured_by_cupy(calls: list[Callable[[], Any]]) -> Callable[[], float]:
    """Capture calls as a CUDA graph; return a function that replays it and returns the time in microseconds."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        calls[0]()  # compiles the kernels
        stream.synchronize()
        stream.begin_capture()
        results = [call() for call in calls]
        graph = stream.end_capture()

    def replay() -> float:
        assert results is not None
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e3

    return replay


def captured_by_torch(calls: list[Callable[[], Any]]) -> Callable[[], float]:
    """Capture calls on PyTorch tensors, like `captured_by_cupy` for CuPy arrays."""
    import torch

    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]

    def replay() -> float:
        assert results is not None
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    return replay


def times_of(
    calls: list[Call], replays: int, capture: Callable[[list[Call]], Callable[[], float]] | None
) -> tuple[float | None, float]:
    """Return the median microseconds of a call in a graph, None without `capture`, and in a row of calls."""

    def wait() -> None:
        if capture is not None:
            import cupy

            cupy.cuda.runtime.deviceSynchronize()

    in_graph, seconds = None, []
    if capture is not None:
        replay = capture(calls)
        replay()
        in_graph = statistics.median(replay() for _ in range(replays)) / len(calls)
    for _ in range(replays):
        wait()
        begin = time.perf_counter()
        for call in calls:
            call()
        wait()
        seconds.append(time.perf_counter() - begin)
    return in_graph, statistics.median(seconds) / len(calls) * 1e6


def sizes_of(text: str) -> tuple[tuple[int, int], ...]:
    """Parse the numbers of sequences and of keys per sequence from the command line.

    >>> sizes_of("1x1024,16x4096")
    ((1, 1024), (16, 4096))
    """
    sizes = [tuple(map(int, size.split("x"))) for size in text.split(",")]
    if not all(len(size) == 2 and min(size) > 0 for size in sizes):
        raise ValueError(text)
    return tuple((batch, keys) for batch, keys in sizes)
