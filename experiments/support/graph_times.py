"""Calls captured into CUDA graphs by CuPy and by PyTorch, with timed replays; sizes of decode steps."""

from collections.abc import Callable
from typing import Any


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


def sizes_of(text: str) -> tuple[tuple[int, int], ...]:
    """Parse the numbers of sequences and of keys per sequence from the command line.

    >>> sizes_of("1x1024,16x4096")
    ((1, 1024), (16, 4096))
    """
    sizes = [tuple(map(int, size.split("x"))) for size in text.split(",")]
    if not all(len(size) == 2 and min(size) > 0 for size in sizes):
        raise ValueError(text)
    return tuple((batch, keys) for batch, keys in sizes)
