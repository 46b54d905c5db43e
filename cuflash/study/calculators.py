"""Memory sizes of calls and KV caches, and the longest sequences that fit, computed without any allocation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import SCALED_DTYPES, Array, as_dtype, describe, int_reasons, is_int, is_integer_dtype, is_number
from ..cache.arguments import page_size_reasons
from ..errors import UnsupportedProblem, collecting, refuse
from ..fp8.rows import SCALE_BYTES
from ..keywords import explains_keywords
from ..planning.plan import KernelPlan
from ..plans.plan import Plan

_SIZE_BITS = 100  # sizes of caches must be less than 2^100 bytes


@explains_keywords
@dataclass(frozen=True)
class Memory:
    """The bytes of a call, as `cuflash.study.memory` returns them.

    Parameters
    ----------
    inputs, results, gradients : int
        Bytes of q, k and v; of o and lse; of dq, dk and dv. Strides are ignored.
    workspace : int
        Additional bytes of the pass that needs more of them, including the work list.

    Examples
    --------
    >>> print(Memory(inputs=3 << 20, results=1 << 20, gradients=3 << 20, workspace=0))
    inputs        3.0 MiB  q, k and v
    results       1.0 MiB  o and lse
    gradients     3.0 MiB  dq, dk and dv
    workspace     0.0 MiB  additional, during a call
    """

    inputs: int
    results: int
    gradients: int
    workspace: int

    @property
    def forward(self) -> int:
        """The bytes of a call of `attention`: inputs, results and workspace.

        Examples
        --------
        >>> Memory(inputs=1, results=2, gradients=4, workspace=8).forward
        11
        """
        return self.inputs + self.results + self.workspace

    def __str__(self) -> str:
        meanings = ("q, k and v", "o and lse", "dq, dk and dv", "additional, during a call")
        names = [field.name for field in fields(self)]
        return "\n".join(
            f"{name:<12}{getattr(self, name) / 2**20:>5.1f} MiB  {meaning}" for name, meaning in zip(names, meanings)
        )


@explains_keywords
def memory(plan: Plan | KernelPlan) -> Memory:
    """Count the bytes of a planned call from its shapes.

    In the example, storing all scores would take 8 * 65536 * 65536 numbers of 2 bytes, that is 64 GiB, per pass.

    Parameters
    ----------
    plan : Plan or KernelPlan
        The result of `cuflash.plan`. With ShapeDtype and `device=` a plan needs neither arrays nor a GPU.

    Returns
    -------
    Memory
        A printable record.

    Raises
    ------
    TypeError
        `plan` is not a plan.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> shape = cuflash.ShapeDtype((8, 65536, 128), np.float16)                      # 8 heads, 64k tokens
    >>> ready = cuflash.plan(shape, shape, shape, causal=True, device=cuflash.DeviceSpec.gpu("H100"))
    >>> print(cuflash.study.memory(ready))
    inputs      384.0 MiB  q, k and v
    results     130.0 MiB  o and lse
    gradients   384.0 MiB  dq, dk and dv
    workspace   260.3 MiB  additional, during a call
    """
    kernel_plan = plan._plan if isinstance(plan, Plan) else plan
    if not isinstance(kernel_plan, KernelPlan):
        raise TypeError(f"plan must be a result of cuflash.plan; got {describe(plan)}")
    problem = kernel_plan.problem
    inputs = sum(map(prod, problem.argument_shapes().values())) * problem.dtype.itemsize
    lse = prod(problem.lse_shape()) * problem.accumulator.itemsize
    return Memory(
        inputs=inputs,
        results=prod(problem.o_shape()) * problem.dtype.itemsize + lse,
        gradients=inputs,
        workspace=kernel_plan.workspace_bytes,
    )


@explains_keywords
def kv_cache_bytes(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    tokens: int | Sequence[int] | Array,
    dtype: DTypeLike,
    page_size: int | None = None,
    value_dim: int | None = None,
) -> int:
    """Count the bytes of keys and values of all layers: num_layers num_kv_heads (head_dim + value_dim) tokens itemsize.

    For example, a model of 70 billion parameters has 80 layers, 64 query heads and head_dim 128. With 8 key/value heads
    a token takes 320 KiB, and a sequence of 8192 tokens 2.5 GiB. With a key/value head for each query head the sequence
    would take 20 GiB. In float8_e4m3fn each row of keys or values of a head takes 4 more bytes for its scale.

    With pages, the length of each sequence is rounded up to whole pages, so less than one page per sequence is unused.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        Number of layers, number of key/value heads in a layer, and length of the last axis of keys.
    tokens : int, or list or NumPy array of ints
        Number of tokens of one sequence, or of each sequence. Without pages, pass the capacity of the cache.
    dtype : dtype
        The dtype of keys and values.
    page_size : int, optional
        Tokens per page: a multiple of 16, at most 1024, as in `KVCache`.
    value_dim : int, optional
        Length of the last axis of values. Default: `head_dim`.

    Returns
    -------
    int
        The bytes.

    Raises
    ------
    UnsupportedProblem
        An argument is invalid. The error lists every reason.

    Examples
    --------
    >>> import numpy as np
    >>> model = {"num_layers": 80, "head_dim": 128, "dtype": np.float16}
    >>> kv_cache_bytes(num_kv_heads=8, tokens=1, **model) / 2**10
    320.0
    >>> kv_cache_bytes(num_kv_heads=8, tokens=8192, **model) / 2**30
    2.5
    >>> kv_cache_bytes(num_kv_heads=64, tokens=8192, **model) / 2**30
    20.0
    >>> kv_cache_bytes(num_kv_heads=8, tokens=1, **model | {"dtype": "float8_e4m3fn"}) / 2**10
    165.0

    >>> kv_cache_bytes(num_kv_heads=8, tokens=[100, 1000], page_size=64, **model) / 2**20
    360.0
    """
    if isinstance(tokens, np.ndarray) and tokens.ndim == 1 and is_integer_dtype(tokens.dtype):
        tokens = tokens.tolist()
    listed: list[Any] = list(tokens) if isinstance(tokens, (list, tuple, range)) else [tokens]
    reasons: list[str] = []
    a_token = _bytes_of_token(reasons, num_layers, num_kv_heads, head_dim, dtype, page_size, value_dim)
    if not all(is_int(each) and each >= 0 for each in listed):
        rule = "tokens must be an int of at least 0, or a list or NumPy array of such ints"
        reasons.append(f"{rule}; got {describe(tokens)}")
    refuse(reasons)
    page = 1 if page_size is None else int(page_size)
    return a_token * sum(-(-int(each) // page) * page for each in listed)


@explains_keywords
def largest_length(
    available_bytes: float,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    batch: int = 1,
    page_size: int | None = None,
    value_dim: int | None = None,
) -> int:
    """Return the largest number of tokens per sequence of a batch whose cache fits in the available bytes.

    Parameters
    ----------
    available_bytes : number
        Bytes for the cache: the memory that weights and activations leave free.
    num_layers, num_kv_heads, head_dim : int
        As in `kv_cache_bytes`.
    dtype : dtype
        As in `kv_cache_bytes`.
    batch : int
        Number of sequences of that length.
    page_size, value_dim : int, optional
        As in `kv_cache_bytes`.

    Returns
    -------
    int
        The number of tokens, rounded down to whole pages.

    Raises
    ------
    UnsupportedProblem
        An argument is invalid. The error lists every reason.

    Examples
    --------
    >>> import numpy as np
    >>> model = {"num_layers": 80, "head_dim": 128, "dtype": np.float16}
    >>> largest_length(20 * 2**30, num_kv_heads=8, **model), largest_length(20 * 2**30, num_kv_heads=64, **model)
    (65536, 8192)
    >>> largest_length(20 * 2**30, num_kv_heads=8, batch=30, page_size=64, **model)
    2176
    """
    reasons: list[str] = []
    a_token = _bytes_of_token(reasons, num_layers, num_kv_heads, head_dim, dtype, page_size, value_dim)
    reasons += int_reasons(1, batch=batch)
    nbytes = available_bytes if is_int(available_bytes) or not is_number(available_bytes) else float(available_bytes)
    if not (is_number(nbytes) and 0 <= nbytes < 1 << _SIZE_BITS):
        reasons.append(f"available_bytes must be a number from 0 to 2**{_SIZE_BITS}; got {describe(available_bytes)}")
    refuse(reasons)
    page = 1 if page_size is None else int(page_size)
    return int(nbytes) // (int(batch) * page * a_token) * page


def _bytes_of_token(
    reasons: list[str], num_layers: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike, page_size: int | None,
    value_dim: int | None,
) -> int:
    """Return the bytes of a token's keys and values in all layers; append to `reasons` if an argument is invalid."""
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    wrong = int_reasons(1, **sizes) + ([] if page_size is None else page_size_reasons(page_size))
    itemsize = of_scales = 0
    with collecting(wrong):
        row_dtype = _dtype_of_numbers("dtype", dtype)
        itemsize, of_scales = row_dtype.itemsize, 2 * SCALE_BYTES * (row_dtype in SCALED_DTYPES)
    reasons += wrong
    if wrong:
        return 0
    a_head: int = (int(head_dim) + int(value_dim)) * itemsize + of_scales
    return int(num_layers) * int(num_kv_heads) * a_head


def _dtype_of_numbers(name: str, value: DTypeLike) -> np.dtype:
    """Return `value` as a NumPy dtype of numbers, such as the rows of a cache have.

    Raises
    ------
    UnsupportedProblem
        `value` is not a dtype of numbers.
    """
    dtype = as_dtype(name, value)
    if dtype.kind not in "fiuV" or dtype.names or not dtype.itemsize:
        raise UnsupportedProblem(f"{name} must be a dtype of numbers; got {dtype}")
    return dtype


def memory_report(arguments: Sequence[str]) -> str:
    """Run ``python -m cuflash memory``.

    Parameters
    ----------
    arguments : sequence of str
        The words after ``memory``.

    Returns
    -------
    str
        The report, with a line for each number.

    Raises
    ------
    SystemExit
        Status 2, and a line with all reasons, if a flag is invalid.

    Examples
    --------
    >>> sizes = "--layers 80 --heads 64 --kv-heads 8 --head-dim 128 --tokens 8192 --available 40"
    >>> print(memory_report(sizes.split()))
    one token               320.00 KiB
    1 x 8192 tokens           2.50 GiB
    with 64 heads            20.00 GiB  a key/value head for each query head
    in 40 GiB            131072 tokens  per sequence, at most
    """
    parser = argparse.ArgumentParser("python -m cuflash memory", description="bytes of a model's KV cache")
    for name, meaning in (
        ("layers", "layers of the model"), ("kv-heads", "key/value heads"), ("head-dim", "length of a row of keys"),
        ("tokens", "tokens per sequence"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, required=True, help=meaning)
    parser.add_argument("--heads", type=int, help="query heads, to compare with a cache without grouped heads")
    parser.add_argument("--batch", type=int, default=1, help="number of sequences; default: 1")
    parser.add_argument("--dtype", default="float16", help="dtype of keys and values; default: float16")
    parser.add_argument("--page-size", type=int, help="tokens per page; default: no pages")
    parser.add_argument("--available", type=float, help="GiB for the cache, to compute how long sequences may be")
    flags = parser.parse_args(arguments)
    reasons = _flag_reasons(flags)
    if reasons:
        parser.error("; ".join(reasons))
    return "\n".join(_report_lines(flags))


def _flag_reasons(flags: argparse.Namespace) -> list[str]:
    """Return why flags are invalid, in terms of the command line."""
    counts = {"layers": flags.layers, "kv-heads": flags.kv_heads, "head-dim": flags.head_dim, "batch": flags.batch}
    reasons = [f"--{name} must be at least 1; got {count}" for name, count in counts.items() if count < 1]
    if flags.tokens < 0:
        reasons.append(f"--tokens must be at least 0; got {flags.tokens}")
    if flags.heads is not None and (flags.heads < 1 or flags.kv_heads > 0 and flags.heads % flags.kv_heads):
        reasons.append(f"--heads must be a multiple of --kv-heads, {flags.kv_heads}; got {flags.heads}")
    if flags.page_size is not None:
        reasons += page_size_reasons(flags.page_size, "--page-size")
    if flags.available is not None and not 0 <= flags.available < 2.0 ** (_SIZE_BITS - 30):
        reasons.append(f"--available must be a number of GiB from 0 to 2**{_SIZE_BITS - 30}; got {flags.available}")
    with collecting(reasons):
        _dtype_of_numbers("--dtype", flags.dtype)
    return reasons


def _report_lines(flags: argparse.Namespace) -> list[str]:
    kv_heads, heads, batch = flags.kv_heads, flags.heads, flags.batch
    model = {
        "num_layers": flags.layers, "head_dim": flags.head_dim, "dtype": flags.dtype, "page_size": flags.page_size,
    }  # fmt: skip
    a_token = kv_cache_bytes(num_kv_heads=kv_heads, tokens=1, **model | {"page_size": None})
    whole = batch * kv_cache_bytes(num_kv_heads=kv_heads, tokens=flags.tokens, **model)
    lines = [("one token", f"{a_token / 2**10:.2f} KiB", "")]
    lines.append((f"{batch} x {flags.tokens} tokens", f"{whole / 2**30:.2f} GiB", ""))
    if heads is not None:
        ungrouped = batch * kv_cache_bytes(num_kv_heads=heads, tokens=flags.tokens, **model)
        meaning = "a key/value head for each query head"
        lines.append((f"with {heads} heads", f"{ungrouped / 2**30:.2f} GiB", meaning))
    if flags.available is not None:
        longest = largest_length(flags.available * 2**30, num_kv_heads=kv_heads, batch=batch, **model)
        lines.append((f"in {flags.available:g} GiB", f"{longest} tokens", "per sequence, at most"))
    return [f"{name:<20}{value:>14}  {meaning}".rstrip() for name, value, meaning in lines]
