"""The peak GPU memory of a call."""

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def peak_on_device(call: Callable[[], Result], limit: int = 0) -> tuple[Result, int]:
    """Return the result of a call, and the peak of the bytes that CuPy allocated; a nonzero limit bounds the peak.

    The call uses a separate memory pool, which returns nothing to the device before the end, so that the size of the
    pool is the peak. It runs on cudaStreamPerThread, for which the library retains no workspaces; on other streams,
    small workspaces of earlier calls would be reused.

    Raises
    ------
    MemoryError
        The call needs more memory than the limit, or than the device has.
    """
    import cupy

    pool = cupy.cuda.MemoryPool()
    if limit:
        pool.set_limit(size=limit)
    try:
        with cupy.cuda.using_allocator(pool.malloc), cupy.cuda.Stream.ptds:
            result = call()
        cupy.cuda.Device().synchronize()
        return result, pool.total_bytes()
    finally:
        pool.free_all_blocks()
