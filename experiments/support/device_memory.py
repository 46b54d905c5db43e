"""The most memory of a GPU that a call takes at once."""

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def peak_on_device(call: Callable[[], Result], limit: int = 0) -> tuple[Result, int]:
    """Return the result of a call, and the bytes that CuPy took from the device for it; a nonzero limit bounds them.

    The call has a memory pool of its own, from which nothing returns to the device before the end, so that what the
    pool took is the peak. It runs on cudaStreamPerThread, where no memory is kept for later calls and none of earlier
    ones is there: on other streams a call finds its workspace made if it is small.

    Raises
    ------
    MemoryError
        The call needs more than the limit, or than there is.
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
