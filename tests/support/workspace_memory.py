"""Test doubles of workspace memory and streams, in host memory, with the interface of the gpu executor's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from cuflash.executors.workspaces import Piece


def memory() -> SimpleNamespace:
    """Return memory that records what it allocated, and in `kept` the zeros that it keeps.

    `allocated` has the arrays, and `outlives` the addresses of those that may outlive the call.
    """
    allocated: list[Any] = []
    zeros: dict[Any, dict[int, Any]] = {}
    pieces: dict[int, list[Any]] = {}

    def maker(shape: tuple[int, ...], dtype: Any) -> Any:
        return lambda: allocated.append(np.zeros(shape, dtype)) or allocated[-1]  # type: ignore[func-returns-value]

    outlives: list[int] = []

    def lasting(nbytes: int) -> Piece:
        array = maker((nbytes,), np.uint8)()
        outlives.append(array.ctypes.data)
        return Piece(nbytes, array, array.ctypes.data)

    return SimpleNamespace(
        allocated=allocated, maker=maker, zeros=lambda shape, dtype: maker(shape, dtype)(), lasting=lasting,
        outlives=outlives, address=lambda array: int(array.ctypes.data), kept_pieces=lambda: pieces, kept=zeros,
        kept_zeros=lambda number, nbytes: zeros.setdefault((number, nbytes), {}),
    )  # fmt: skip


def stream(ptr: int = 7, is_capturing: bool = False) -> SimpleNamespace:
    """Return a stream with an address, which is being captured or not."""
    return SimpleNamespace(ptr=ptr, is_capturing=lambda: is_capturing)
