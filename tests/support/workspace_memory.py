"""Test doubles of workspace memory and streams, in host memory, with the interface of the gpu executor's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


def memory() -> SimpleNamespace:
    """Return memory that records in `allocated` what it allocated, and in `kept` the zeros that it keeps."""
    allocated: list[Any] = []
    zeros: dict[Any, dict[int, Any]] = {}
    pieces: dict[int, list[Any]] = {}

    def maker(shape: tuple[int, ...], dtype: Any) -> Any:
        return lambda: allocated.append(np.zeros(shape, dtype)) or allocated[-1]  # type: ignore[func-returns-value]

    return SimpleNamespace(
        allocated=allocated, maker=maker, zeros=lambda shape, dtype: maker(shape, dtype)(),
        address=lambda array: int(array.ctypes.data), kept_pieces=lambda: pieces, kept=zeros,
        kept_zeros=lambda number, nbytes: zeros.setdefault((number, nbytes), {}),
    )  # fmt: skip


def stream(ptr: int = 7, is_capturing: bool = False) -> SimpleNamespace:
    """Return a stream with an address, which is being captured or not."""
    return SimpleNamespace(ptr=ptr, is_capturing=lambda: is_capturing)
