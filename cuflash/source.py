"""From a kernel's specification to its text: our includes flattened into one translation unit, constants in front."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import BFLOAT16
from .records import assertions

KERNELS = Path(__file__).parents[1] / "kernels_cu"
HOST = Path(__file__).parent / "sim"  # its ptx/ stands in for that of kernels_cu/

_ELEMENTS = {
    np.dtype(np.float16): "ptx::Half",
    BFLOAT16: "ptx::BFloat16",
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
}
_TF32_PRODUCTS = {"ieee": 0, "tf32": 1, "tf32x3": 3}  # for one of floats
_INCLUDE = re.compile(r"\s*#\s*include(.*)")  # and include_next
_OURS = re.compile(r"\s*<((?:ptx|tile|attention)/[a-z0-9_]+\.cuh)>\s*(?://.*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """Everything that changes a kernel's machine code, and nothing else.

    >>> import numpy as np
    >>> KernelSpec(
    ...     family="simt", entry="forward", dtype=np.dtype(np.float32),
    ...     head_dim=64, value_dim=64, block_q=64, block_kv=64,
    ... ).name
    'simt_forward'

    Attributes
    ----------
    family, entry : str
        kernels_cu/<family>/<entry>.cu, which defines the kernel <family>_<entry>.
    dtype : numpy.dtype
        Of q, k and v.
    head_dim, value_dim : int
        What the kernel has room for: the problem's own, rounded up.
    block_q, block_kv : int
        Queries and keys of a tile.
    num_warps : int
        Of a thread block.
    min_blocks : int
        Thread blocks that a multiprocessor holds at least: what the compiler shares the registers among.
    is_listed : bool
        The kernel walks a list of blocks.
    num_stages : int
        Tiles that are copied ahead and at hand.
    dq_adds : 0, 1 or 4
        Sums of dQ that one instruction adds to; 0 where dQ has a kernel of its own.
    finishes_dq : bool
        Blocks that add to dQ may finish it: of some batch entries and heads, or, of a list, all of it.
    is_split : bool
        Blocks share a tile's keys, and leave their parts to be merged.
    is_packed : bool
        A tile holds the queries of all heads that share a key/value head.
    mma_rows : 0, 8 or 16
        Rows of the tensor cores' instruction that makes the products; 0 where multiply-adds make them.
    is_watched : bool
        Waiting for long at a barrier in shared memory ends the kernel with an error, where it would hang.
    precision : "ieee", "tf32" or "tf32x3"
        Of the products.
    """

    family: str
    entry: str
    dtype: np.dtype[Any]
    head_dim: int
    value_dim: int
    block_q: int
    block_kv: int
    num_warps: int = 4
    min_blocks: int = 2
    is_listed: bool = False
    num_stages: int = 1
    dq_adds: int = 0
    finishes_dq: bool = False
    is_split: bool = False
    is_packed: bool = False
    mma_rows: int = 0
    is_watched: bool = False
    precision: str = "ieee"

    @property
    def name(self) -> str:
        return f"{self.family}_{self.entry}"

    @property
    def takes_maps(self) -> bool:
        """The kernel has a second parameter, of tensor maps."""
        return self.family == "sm90" and self.entry in ("forward", "backward", "backward_rows", "backward_wide")

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{field.name} {getattr(self, field.name)}" for field in fields(self)[2:])])

    def constants(self) -> str:
        """The specification as C++: one line a field."""
        accumulator = "double" if self.dtype == np.float64 else "float"
        lines = [f"using Element = {_ELEMENTS[self.dtype]};", f"using Accumulator = {accumulator};"]
        lines.append(f"constexpr int kTf32Products = {_TF32_PRODUCTS[self.precision]};")
        for field in fields(self)[3:]:
            if field.name == "precision":
                continue
            name = "".join(word.capitalize() for word in field.name.split("_"))
            value = getattr(self, field.name)
            kind, text = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", str(value))
            lines.append(f"constexpr {kind} k{name} = {text};")
        return "\n".join(["namespace cuflash::config {", *lines, "}  // namespace cuflash::config", ""])


@lru_cache(maxsize=1024)
def source(spec: KernelSpec, *, host: bool = False) -> str:
    """One text that holds all of a kernel, for NVRTC, or with the simulator's `ptx/` for the host's compiler.

    `#line` keeps our file names and line numbers in every message.
    """
    seen: set[str] = set()
    types = "".join(_flattened("ptx/types.cuh", seen, host))
    entry = "".join(_flattened(f"{spec.family}/{spec.entry}.cu", seen, host))
    maps = "attention/tensor_maps.cuh"
    layout = f'#line 1 "cuflash/records.py: assertions()"\n{assertions(host=host, with_maps=maps in seen)}'
    return f"// {spec}\n{types}{spec.constants()}{entry}{layout if 'attention/params.cuh' in seen else ''}"


def flatten(path: str, *, host: bool = False) -> str:
    """A file of `kernels_cu/` with everything it includes, each file once.

    Raises
    ------
    ValueError
        A line includes something that is not one of our files, in angle brackets.
    """
    return "".join(_flattened(path, set(), host))


def flatten_text(text: str, name: str, *, host: bool = False) -> str:
    """The same of a text that is no file of `kernels_cu/`; messages call it `name`."""
    return "".join(_expanded(text, name, set(), host))


def _flattened(path: str, seen: set[str], host: bool) -> Iterator[str]:
    seen.add(path)
    yield from _expanded(_read(path, host), _shown(path, host), seen, host)


def _expanded(text: str, shown: str, seen: set[str], host: bool) -> Iterator[str]:
    yield f'#line 1 "{shown}"\n'
    for number, line in enumerate(text.splitlines(), 1):
        include = _INCLUDE.fullmatch(line)
        if include is None:
            yield "\n" if line == "#pragma once" else line + "\n"  # each file comes once, and the text has no header
            continue
        ours = _OURS.fullmatch(include[1])
        if ours is None:
            raise ValueError(
                f"{shown}:{number} must include files of kernels_cu/ in angle brackets, like <ptx/mma.cuh>; "
                f"it has {line.strip()!r}"
            )
        if ours[1] not in seen:
            yield from _flattened(ours[1], seen, host)
        yield f'#line {number + 1} "{shown}"\n'


def _shown(path: str, host: bool) -> str:
    """The name of a file in compilers' messages."""
    return f"cuflash/sim/{path}" if host and path.startswith("ptx/") else f"kernels_cu/{path}"


def _read(path: str, host: bool) -> str:
    folder = HOST if host and path.startswith("ptx/") else KERNELS
    return (folder / path).read_text("utf-8")
