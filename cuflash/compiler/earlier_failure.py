"""Failures of earlier kernels, which CUDA reports in a later call of the process."""

from __future__ import annotations

# Codes of the driver and of the runtime after which CUDA refuses all work of a process: memory errors (214), accesses
# outside arrays (700, 716, 717), timeouts (702), destroyed contexts (709), assertions (710), faulty instructions (714,
# 715, 718), and other failures of a kernel (719).
_STATUS = frozenset({214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})


def raise_earlier(error: Exception) -> None:
    """Raise RuntimeError if CuPy's error reports the failure of an earlier kernel instead of the caller's own call.

    Raises
    ------
    RuntimeError
        An earlier kernel of any library failed.
    """
    if getattr(error, "status", 0) in _STATUS:
        raise RuntimeError(
            f"an earlier kernel of this process failed ({error}), perhaps one of another library, so CUDA refuses all "
            f"further work: start a new process; to find the kernel, use compute-sanitizer, or CUFLASH_CHECK=1 for "
            f"kernels of cuflash"
        ) from error
