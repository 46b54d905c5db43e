"""Launches of the small kernels in tests/support/probes/, each with the result that a line of NumPy predicts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from cuflash.planning.captured_sums import EXACT_WORDS
from cuflash.planning.families.family import Request
from cuflash.planning.launches import DqSemaphoreOrder, Pass
from cuflash.executors._records import View
from cuflash.executors.params import templates_of
from cuflash.executors.sim import Simulator
from cuflash.planning.plan import KernelPlan
from cuflash.planning.spec import KernelSpec
from cuflash.compiler.source import flatten_text
from cuflash.executors.tensor_map import BoxedArray, encoded, simulated
from cuflash.testing import Structure
from cuflash.blocks.work_list import ListedWork
from executors import in_turn, to_device
from fused_dq import finishing_order

import cuflash
from cuflash import masks, patterns, sim

PROBES = Path(__file__).parent / "probes"
ELEMENTS = {"float16": "ptx::Half", "bfloat16": "ptx::BFloat16", "float32": "float", "float64": "double"}
E4M3 = {"float8_e4m3fn": "ptx::Float8E4M3"}
ULP = {np.dtype(np.float32): 2.0**-23, np.dtype(np.float64): 2.0**-52}


@dataclass(frozen=True)
class Expected:
    """Expected contents of an argument after a launch: exact bits, or numbers within `ulps` units in the last place."""

    values: Any
    ulps: float = 0.0
    where: Any = None  # elements to compare; all by default


@dataclass(frozen=True)
class Record:
    """A by-value parameter: the params record of a plan, for the arrays of its work list."""

    plan: KernelPlan

    def at(self, lists: Mapping[str, Any], address: Any) -> Any:
        problem = self.plan.problem
        view = View("lse", problem.accumulator, problem.lse_shape(), (0,) * len(problem.lse_shape()))
        (arguments,) = templates_of(self.plan, Pass({}), (view,), Simulator().tensor_map)
        params = arguments["params"]
        for word, name in params.addresses:
            params.words[word] += np.uint64(address(lists[name]) if name in lists else 0)
        return params.record[()].copy()


@dataclass(frozen=True)
class TensorMap:
    """A by-value parameter: a tensor map that describes how boxes of another argument are copied."""

    place: int
    box: tuple[int, ...]
    swizzle_bytes: int = 0
    columns: int | None = None  # number of leading columns to map; all by default

    def of(self, array: Any) -> BoxedArray:
        array = array[..., : self.columns]
        return BoxedArray(array.dtype, array.shape, array.strides, self.box, self.swizzle_bytes)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch of one kernel of a probe file, with its arguments and the expected contents of those that it writes."""

    name: str
    file: str
    entry: str
    block: int
    arguments: tuple[Any, ...]
    expected: Mapping[int, Expected]
    grid: int = 1
    shared_bytes: int = 0
    constants: Mapping[str, Any] = field(default_factory=dict)
    mma_rows: int = 0  # as in KernelSpec
    tf32_products: int = 0
    architecture: str = "sm_90"  # target architecture; a letter suffix restricts it to one chip

    def text(self, *, host: bool) -> str:
        sizes = f"static constexpr int kMmaRows = {self.mma_rows}, kTf32Products = {self.tf32_products};"
        config = f"namespace cuflash {{ struct Config {{ {sizes} static constexpr bool kHasWatchdog = true; }}; }}"
        lines = ["#include <ptx/types.cuh>", config, "namespace probe {", "using namespace cuflash;"]
        for name, value in self.constants.items():
            lines.append(f"constexpr int {name} = {value};" if isinstance(value, int) else f"using {name} = {value};")
        lines += ["}  // namespace probe", f'#line 1 "tests/support/probes/{self.file}.cu"']
        own = (PROBES / f"{self.file}.cu").read_text("utf-8")
        # The types follow the constants, so that they precede the probe's own includes.
        return flatten_text("\n".join(lines) + "\n" + own, f"tests/support/probes/{self.file}.cu", host=host)

    def on_simulator(self, schedule: sim.Schedule = sim.Schedule()) -> dict[int, Any]:
        """Return the contents of array arguments after a run on the simulator, by position."""
        inputs = [_own(x) if isinstance(x, np.ndarray) and x.size else x for x in self.arguments]
        passed = list(inputs)
        for place, x in enumerate(inputs):
            if isinstance(x, Record):
                passed[place] = x.at(x.plan.work.lists, lambda array: array.ctypes.data)[()]
            elif isinstance(x, TensorMap):
                passed[place] = simulated(x.of(inputs[x.place]), inputs[x.place].ctypes.data)
        kernel = sim.build(self.text(host=True), self.entry)
        flushes = "double" not in self.constants.values()
        kernel(self.grid, self.block, tuple(passed), self.shared_bytes, schedule, flushes=flushes)
        return {place: x for place, x in enumerate(inputs) if isinstance(x, np.ndarray)}

    def on_gpu(self) -> dict[int, Any]:
        """Return the contents of array arguments after a run on CuPy's device, by position."""
        import cupy

        inputs: list[Any] = []
        alive = []
        for argument in self.arguments:
            if isinstance(argument, Record):
                lists = {name: cupy.asarray(array) for name, array in argument.plan.work.lists.items()}
                alive.append(lists)
                inputs.append(argument.at(lists, lambda array: array.data.ptr))
            else:
                inputs.append(to_device(_as_bits(argument)) if isinstance(argument, np.ndarray) else argument)
        for place, argument in enumerate(self.arguments):
            if isinstance(argument, TensorMap):
                tiles = argument.of(self.arguments[argument.place])
                inputs[place] = encoded(tiles, inputs[argument.place].data.ptr)
        own_chip = (f"-arch={self.architecture}",) if self.architecture.endswith("a") else ()
        kernel = cupy.RawKernel(self.text(host=False), self.entry, ("-std=c++17", *own_chip))
        if self.shared_bytes > 48 << 10:
            kernel.max_dynamic_shared_size_bytes = self.shared_bytes
        kernel((self.grid,), (self.block,), tuple(inputs), shared_mem=self.shared_bytes)
        return {place: x.get().view(self.arguments[place].dtype) for place, x in enumerate(inputs) if hasattr(x, "get")}


def _own(array: Any) -> Any:
    """Return a copy with the same strides, including gaps."""
    low, high = np.lib.array_utils.byte_bounds(array)
    memory = np.empty(high - low + 16, np.uint8)
    first = -memory.ctypes.data % 16 + low % 16
    memory = memory[first % 16 :][: high - low]
    view = np.ndarray(array.shape, array.dtype, memory, array.ctypes.data - low, array.strides)
    view[...] = array
    return view


def _as_bits(array: Any) -> Any:
    """Return the array, or its bits as integers if CuPy may lack its dtype."""
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def same_bits(first: Any, second: Any) -> bool:
    """Return whether arrays are equal bit for bit, where all NaN count as equal."""
    if first.dtype.kind in "iu":
        return bool(np.array_equal(first, second))
    with np.errstate(invalid="ignore"):
        nan, other = (np.isnan(x.astype(np.float64)) for x in (first, second))
    return np.array_equal(nan, other) and first[~nan].tobytes() == second[~nan].tobytes()


def assert_expected(launch: Launch, results: Mapping[int, Any]) -> None:
    for place, expected in launch.expected.items():
        actual, right = results[place], np.asarray(expected.values)
        assert actual.shape == right.shape, (launch.name, place)
        where = np.ones(right.shape, bool) if expected.where is None else expected.where
        if not expected.ulps:
            with np.errstate(invalid="ignore"):  # converting a signaling NaN may warn
                actual, right = (x[where].astype(np.float64) for x in (actual, right))
            np.testing.assert_array_equal(actual, right, f"{launch.name}, argument {place}")
        else:
            np.testing.assert_allclose(
                actual[where], right[where], rtol=expected.ulps * ULP[actual.dtype], atol=0,
                err_msg=f"{launch.name}, argument {place}",
            )  # fmt: skip


# ---- wrappers of ptx/ ----


def matrices() -> Launch:
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 2**16, (32, 8), np.uint16)
    rows = rng.permutation(32).astype(np.int32)
    fragments = rng.integers(0, 2**32, (32, 4), np.uint32)
    loaded, stored = np.zeros((6, 32, 4), np.uint32), np.zeros((6, 32, 8), np.uint16)
    right_loaded, right_stored = loaded.copy(), stored.copy()
    for form, (trans, count) in enumerate(itertools.product((False, True), (1, 2, 4))):
        turned = memory[rows].reshape(4, 8, 8)
        turned = turned.swapaxes(1, 2) if trans else turned
        right_loaded[form] = np.ascontiguousarray(turned).reshape(4, 32, 2).view(np.uint32)[..., 0].T
        right_loaded[form, :, count:] = 0
        tiles = np.ascontiguousarray(fragments.T).view(np.uint16).reshape(4, 8, 8)
        tiles = tiles.swapaxes(1, 2) if trans else tiles
        right_stored[form, rows[: 8 * count]] = tiles.reshape(32, 8)[: 8 * count]
    return Launch(
        name="ldmatrix and stmatrix", file="matrices", entry="matrices", block=32, shared_bytes=512,
        arguments=(memory, rows, fragments, loaded, stored),
        expected={3: Expected(right_loaded), 4: Expected(right_stored)},
    )  # fmt: skip


def mma(units: Sequence[float] = (1, 1, 1)) -> Launch:
    """Multiply small integers times a unit for each dtype: every sum is exact, so an element at a wrong place shows."""
    rng = np.random.default_rng(1)
    arguments, expected = [], {}
    for dtype, depth, unit in zip((np.float16, ml_dtypes.bfloat16, np.float32), (16, 16, 8), units):
        a, b = rng.integers(-8, 9, (16, depth)), rng.integers(-8, 9, (depth, 8))
        d = rng.integers(-99, 99, (16, 8))
        columns = b.T if depth == 16 else b
        stored = [(unit * a).astype(dtype), np.ascontiguousarray(columns).astype(dtype)]
        arguments += [x.view(np.uint16) if depth == 16 else x for x in stored]
        arguments += [(unit * d).astype(np.float32)]
        expected[len(arguments) - 1] = Expected((unit * (d + a @ b)).astype(np.float32))
    return Launch(
        name=f"mma in units of {units}", file="mma", entry="mma", block=32, shared_bytes=1024,
        arguments=tuple(arguments), expected=expected,
    )  # fmt: skip


def mma_double(rows: int) -> Launch:
    rng = np.random.default_rng(rows)
    a, b = (rng.integers(-8, 9, shape).astype(np.float64) for shape in ((rows, 4), (4, 8)))
    d = rng.integers(-99, 99, (rows, 8)).astype(np.float64)
    return Launch(
        name=f"mma of {rows} rows of doubles", file="mma_double", entry="mma_double", block=32,
        constants={"kRows": rows}, arguments=(a, b, d), expected={2: Expected(d + a @ b)},
    )  # fmt: skip


def words() -> Launch:
    lane = np.arange(64) % 32
    up, down = np.where(lane % 8 < 3, lane, lane - 3), np.where(lane % 8 > 4, lane, lane + 3)
    xor = np.where((lane ^ 4) > (lane | 3), lane, lane ^ 4)
    halves = np.where(lane < 16, np.minimum(lane + 1, 15), np.maximum(lane - 1, 16))
    chosen = lane // 8 * 8 + (lane + 5) % 8
    shuffled = [10 * chosen, 10 * (lane ^ 9), 10 * up, 10 * down, 80 + 0 * lane, 10 * xor, halves, 0 * lane]
    votes = np.broadcast_to([sum(1 << i for i in range(0, 32, 3)), 1, 1, 0], (64, 4))
    bits = [i + min(i, 3) + i.bit_count() + 32 - max(i.bit_length(), 1) + (i & -i).bit_length() for i in range(32)]
    unsigned = np.full(64, -1)  # the maximum of lane - 20 as unsigned numbers
    sums = [lane * 0 + x for x in ((lane[:32] - 20).sum(), -20, 11, 31)]
    reduced = np.stack([*sums, unsigned, np.array(bits * 2)], axis=1)
    return Launch(
        name="words of the language", file="words", entry="words", block=64,
        arguments=(
            np.zeros((64, 8), np.int32), np.zeros((64, 4), np.uint32), np.zeros((64, 6), np.int32), np.zeros(64),
            np.full(64, np.nan, np.float32),
        ),
        expected={0: Expected(np.stack(shuffled, axis=1)), 1: Expected(votes), 2: Expected(reduced),
                  3: Expected((lane ^ 1) + 1.5),
                  4: Expected(np.where(lane % 3 == 1, lane + 0.25, np.nan).astype(np.float32))},
    )  # fmt: skip


def atomics() -> Launch:
    arguments = (
        np.zeros(1, np.float32), np.zeros(2, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32),
        np.zeros(1, np.uint32), np.ones(32, np.float32), np.ones(32, np.float64), np.full(1, 5, np.int32),
        np.zeros(800, np.int32),
    )  # fmt: skip
    reduced = 1 + 3 * (np.arange(128) + 0.5).reshape(4, 32).sum(axis=0)
    taken = np.isin(np.arange(800), 5 + 2 * np.arange(3 * 128))  # each number is taken once
    right = ([3 * sum(range(128))], [127, -127], [0], [12], [0xFFFFFFFF], reduced, reduced, [5 + 2 * 3 * 128], taken)
    return Launch(
        name="atomics", file="atomics", entry="atomics", block=128, grid=3, arguments=arguments,
        expected={place: Expected(np.array(values)) for place, values in enumerate(right)},
    )  # fmt: skip


def exact_sums(dtype: str) -> Launch:
    """Sum terms of all magnitudes, terms that cancel, and non-finite terms; `math.fsum` computes the expected sums."""
    number, rng, size = np.dtype(dtype), np.random.default_rng(7), 96
    any_bits = rng.integers(0, 2**32, (12, size * number.itemsize // 4), np.uint32).view(number)
    largest = np.finfo(number).max / (4 * size)  # so that no sum overflows
    with np.errstate(all="ignore"):
        any_bits = np.where(abs(any_bits) < largest, any_bits, number.type(0))
    least = np.full((2, size), np.finfo(number).smallest_subnormal)
    terms = np.concatenate([any_bits, rng.standard_normal((6, size)), least]).astype(number)
    terms[6:9, 1::2] = -terms[6:9, ::2]  # sums are 0
    terms[9:12, 2::2] = -terms[9:12, 1:-1:2]  # sums are the first term plus the last
    terms[-1, ::3] *= -1
    special, lowest = np.repeat(terms[12:13], 5, axis=0), np.finfo(number).min
    for row, values in zip(special, ((np.inf,), (-np.inf,), (np.nan,), (np.inf, -np.inf), (lowest,) * 3)):
        row[5 : 5 + len(values)] = values
    terms = np.ascontiguousarray(np.concatenate([terms, special]))
    sums = [fsum(map(float, row)) for row in terms[:-5]] + [np.inf, -np.inf, np.nan, np.nan, -np.inf]
    with np.errstate(over="ignore"):
        right = np.array(sums).astype(number)
    rows = len(terms)
    return Launch(
        name=f"exact sums of {dtype}", file="exact_sum", entry="exact_sums", block=64, grid=rows,
        arguments=(terms, np.int32(size), np.zeros((rows, EXACT_WORDS[number]), np.int64), np.zeros(rows, number)),
        expected={3: Expected(right, ulps=1)},
        constants={"Number": ELEMENTS[dtype], "kNumWords": EXACT_WORDS[number]},
    )  # fmt: skip


def math() -> Launch:
    count = 2**16
    bits = np.random.default_rng(2).integers(0, 2**32, count, np.uint32)
    # Ties, subnormals and overflow of the 16-bit types, which random bits rarely produce.
    bits[: count // 2] = np.arange(count // 2, dtype=np.uint32) * 0x1000 + 0x33000000 & 0xFFFFFFFF
    x = bits.view(np.float32)
    every, number = np.arange(count).astype(np.uint16), ~np.isnan(x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        low, high = (np.where(number, v.astype(np.float16).view(np.uint16), 0x7FFF).astype(np.uint32) for v in (x, -x))
        # ml_dtypes preserves more of a NaN than the GPU does.
        short = np.where(number, x.astype(ml_dtypes.bfloat16).view(np.uint16), 0x7FFF).astype(np.uint32)
        power = np.exp2(x.astype(np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithm = np.log2(x.astype(np.float64)) + np.where((x < 0.5) | (x > 2), 0, 2)
        reciprocal = 1 / np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x).astype(np.float64)
        right_reciprocal = np.where(np.abs(reciprocal) < 2.0**-126, np.copysign(0, reciprocal), reciprocal)
    rounded = (bits.astype(np.uint64) + 0x1000 & 0xFFFFE000).astype(np.uint32)
    is_normal = number & (power >= 2.0**-126) & (power < 2.0**128)
    right_power = np.where(is_normal, power, 0)
    floats, words_ = (lambda: np.zeros(count, np.float32)), (lambda: np.zeros(count, np.uint32))
    arguments = [x, floats(), floats(), words_(), words_(), words_(), *(floats() for _ in range(3)), np.int32(count)]
    expected = {
        1: Expected(every.view(np.float16).astype(np.float32)),
        2: Expected(every.view(ml_dtypes.bfloat16).astype(np.float32)),
        3: Expected((low | high << 16) ^ low),
        4: Expected((short | 0x3F80 << 16) ^ short << 16),
        5: Expected(np.where(number, rounded, 0)),
        6: Expected(right_power, ulps=2, where=number & (power < 2.0**128)),
        7: Expected(right_reciprocal, ulps=2, where=number),
        8: Expected(logarithm, ulps=3, where=(x >= 2.0**-126) & np.isfinite(x)),
    }
    for dtype, half_bits in ((np.float32, 12), (np.float64, 27)):
        some = np.exp(np.random.default_rng(3).uniform(-4, 4, 64)).astype(dtype)
        factor = dtype(1 + 2.0**-half_bits)  # its square needs one bit too many
        exact = np.array([0, 0, factor, -(1 + 2.0 ** (1 - half_bits))], dtype)
        wide = some.astype(np.longdouble)
        functions = np.stack([np.exp2(wide), np.log(wide), np.log2(wide)], axis=1).ravel()
        arguments += [some, np.zeros(192, dtype), exact]
        expected[len(arguments) - 2] = Expected(functions.astype(dtype), ulps=4)
        expected[len(arguments) - 1] = Expected(np.array([-np.inf, 2.0 ** (-2 * half_bits), *exact[2:]], dtype))
    return Launch(
        name="conversions and functions", file="math", entry="math", block=64, grid=4, arguments=tuple(arguments),
        expected=expected,
    )  # fmt: skip


def subnormals() -> Launch:
    """Compute with subnormal floats: a GPU flushes them, except in a few instructions."""
    rng, least = np.random.default_rng(4), np.finfo(np.float32).tiny
    x, y = (np.exp2(rng.uniform(-140, -116, 32)).astype(np.float32) for _ in range(2))
    y[::4] = x[::4] * 1e5  # normal, unlike x, in most lanes
    y[1::4] = np.exp2(rng.uniform(-20, 5, 8))
    z = np.exp2(rng.uniform(-150, -110, 32))
    bits = rng.integers(1, 128, 32).astype(np.uint16)  # subnormal as bfloat16 and as float16

    def flushed(numbers: Any) -> Any:
        return np.where(np.abs(numbers) < least, 0, numbers).astype(np.float32)

    a, b = flushed(x).astype(float), flushed(y).astype(float)
    with np.errstate(divide="ignore"):
        exact = (a + b, a * b, a * b + a, np.maximum(a, b), np.where(a < b, 1, 2), np.log(a), z, np.sqrt(a))
    unflushed = np.stack([np.minimum(x, y), np.maximum(x, y), z.astype(np.float32), bits * 2.0**-133], axis=1)
    halves = (bits.view(np.float16) / 2).view(np.uint16)
    arguments = (x, y, z, bits, np.zeros((32, 8), np.float32), np.zeros((32, 4), np.float32),
                 np.zeros((32, 2), np.uint16), y.copy())  # fmt: skip
    return Launch(
        name="subnormal numbers", file="subnormals", entry="subnormals", block=32, arguments=arguments,
        expected={4: Expected(np.stack([flushed(each) for each in exact], axis=1), ulps=4),
                  5: Expected(unflushed.astype(np.float32)), 6: Expected(np.stack([bits, halves], axis=1)),
                  7: Expected(flushed(a + b))},
    )  # fmt: skip


def copy() -> Launch:
    data = np.random.default_rng(3).integers(1, 256, (32, 64), np.uint8)
    sizes = np.arange(32, dtype=np.int32) % 17
    right = np.zeros((32, 64), np.uint8)
    for lane, size in enumerate(sizes):
        for start, bytes_ in ((0, size % 5), (8, size % 9), (16, size), (32, size)):
            right[lane, start : start + bytes_] = data[lane, start : start + bytes_]
    # Bytes between the copies are not written.
    written = np.zeros(64, bool)
    written[[*range(4), *range(8, 48)]] = True
    return Launch(
        name="copies and barriers", file="copy", entry="copy", block=128, shared_bytes=2048 + 128,
        arguments=(data, np.zeros((32, 64), np.uint8), sizes, np.zeros(32, np.int32)),
        expected={1: Expected(np.where(written, right, 0)), 3: Expected(3 * np.arange(31, -1, -1))},
    )  # fmt: skip


# ---- index maps and copies of tile/ ----

SENTINEL = -7


def _tile(
    name: str,
    entry: str,
    dtype: str,
    mma_rows: int,
    arguments: tuple[Any, ...],
    expected: dict[int, Any],
    **sizes: int,
) -> Launch:
    wide = "double" if dtype == "float64" else "float"
    constants = {"T": wide, "Element": ELEMENTS[dtype]} | {"kRows": 32, "kColumns": 64, "kDepth": 40} | sizes
    return Launch(
        name=f"{name} {dtype}" + f", mma of {mma_rows} rows" * (mma_rows > 0), file="tile", entry=entry, block=128,
        shared_bytes=64 << 10, constants=constants, mma_rows=mma_rows, arguments=arguments, expected=expected,
    )  # fmt: skip


def _wide(dtype: str) -> Any:
    return np.float64 if dtype == "float64" else np.float32


def _pitch(dtype: str, columns: int, mma_rows: int) -> int:
    return columns + (32 if mma_rows else 16) // np.dtype(_wide(dtype)).itemsize


def _held(rows: int, columns: int, run: int, width: int) -> tuple[Any, Any]:
    """Return the rows and columns that each of 128 threads holds, where `width` threads share a row."""
    thread, i, j = np.arange(128)[:, None], np.arange(rows * width // 128), np.arange(columns // width)
    return thread // width + 128 // width * i, (j // run * width + thread % width) * run + j % run


def maps(dtype: str, mma_rows: int = 0) -> Launch:
    width, least_run = (4, 2) if mma_rows else (8, 1)
    rows, columns, run = 256 // width, 64, 16 // np.dtype(_wide(dtype)).itemsize
    plain, in_runs = _held(rows, columns, least_run, width), _held(rows, columns, run, width)
    elements = np.arange(rows)[:, None] * _pitch(dtype, columns, mma_rows) + np.arange(columns)
    vectors = np.where(np.arange(columns) % run == 0, elements, -1)
    sums = (np.arange(128) ** 2).reshape(-1, width).sum(axis=1).repeat(width)
    scaled = np.broadcast_to([[6], [30]], (128, 2, columns // width))
    right = (*plain, *in_runs, elements, vectors, sums, scaled)
    kinds = (np.int32,) * 6 + (_wide(dtype),) * 2
    arguments = tuple(np.zeros(values.shape, kind) for values, kind in zip(right, kinds))
    return _tile("index maps", "maps", dtype, mma_rows, arguments, dict(enumerate(map(Expected, right))), kRows=rows)


def loads(dtype: str, mma_rows: int = 0) -> Iterator[Launch]:
    numbers = np.random.default_rng(4).integers(1, 99, (70, 140)).astype(_numpy(dtype))
    views = {
        "naive": numbers[:32, :64].copy(),
        "aligned rows of a larger array": _aligned(numbers)[3:40, 16:80],
        "aligned, too few columns": _aligned(numbers)[:, :24],
        "rows that start at odd addresses": _aligned(numbers)[:, 1:65],
        "odd pitch": numbers.ravel()[: 40 * 67].reshape(40, 67)[:, :60],
        "every other column": numbers[:40, ::2],
        "backwards": numbers[40::-1, 63::-1],
        "transposed": numbers[:64, :40].T,
        "one row for all": np.broadcast_to(numbers[:1, :64], (32, 64)),
        "columns that are not whole vectors": _aligned(numbers)[:20, :61],
        "one element": numbers[:1, :1],
        "no row": numbers[:0, :64],
    }
    for name, view in views.items():
        for row_bits in (-1, 0x5555_5555, 0x0F0F_8001):
            yield _load(f"load, {name}, {row_bits:#x}", dtype, mma_rows, view, row_bits)


def _load(name: str, dtype: str, mma_rows: int, view: Any, row_bits: int) -> Launch:
    right = np.full((32, _pitch(dtype, 64, mma_rows)), SENTINEL, _wide(dtype))
    right[:, :64] = 0
    rows, columns = min(view.shape[0], 32), min(view.shape[1], 64)
    part = view[:rows, :columns].astype(_wide(dtype))
    is_kept = (row_bits >> np.arange(rows) & 1).astype(bool)
    right[:rows, :columns] = np.where(is_kept[:, None], part, 0)
    strides = [np.int64(step // view.itemsize) for step in view.strides]
    arguments = (view, *strides, np.int32(view.shape[0]), np.int32(view.shape[1]), np.int64(row_bits), right * 0)
    return _tile(name, "loads", dtype, mma_rows, arguments, {6: Expected(right)})


def _numpy(dtype: str) -> Any:
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def _aligned(numbers: Any) -> Any:
    """Return equal numbers at an address that is a multiple of 64, with a row pitch of 160 numbers."""
    memory = np.zeros(len(numbers) * 160 * numbers.itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    wide = memory[start:][: len(numbers) * 160 * numbers.itemsize].view(numbers.dtype).reshape(len(numbers), 160)
    wide[:, : numbers.shape[1]] = numbers
    return wide


def stores(dtype: str, mma_rows: int = 0) -> Iterator[Launch]:
    places = {
        "naive": lambda x: x[:32, :64],
        "short": lambda x: x[:29, :50],
        "short by whole vectors": lambda x: x[:29, :48],
        "rows that start at odd addresses": lambda x: x[:32, 1:65],
        "odd pitch": lambda x: x.ravel()[: 40 * 139].reshape(40, 139)[:, :64],
        "every other column": lambda x: x[:32, ::2][:, :64],
        "backwards": lambda x: x[31::-1, 63::-1],
        "transposed": lambda x: x[:64, :32].T,
    }
    for (name, place), first in itertools.product(places.items(), (0, 5)):
        memory = np.full((70, 140), SENTINEL).astype(_numpy(dtype))
        after = memory.copy()
        to = place(after)
        start = np.int64((to.ctypes.data - after.ctypes.data) // to.itemsize)
        strides = [np.int64(step // to.itemsize) for step in to.strides]
        limits = [np.int32(first), np.int32(to.shape[0]), np.int32(to.shape[1])]
        height, width = min(32, len(to) - first), min(64, to.shape[1])
        number = 1000.0 * np.arange(height)[:, None] + np.arange(width)
        to[first : first + height, :width] = number.astype(_wide(dtype)).astype(_numpy(dtype))
        shared = np.full((32, _pitch(dtype, 64, mma_rows)), SENTINEL, _wide(dtype))
        shared[:, :64] = 1000 * np.arange(32)[:, None] + np.arange(64)
        yield _tile(
            f"store, {name}, from row {first}", "stores", dtype, mma_rows,
            (memory, memory.copy(), start, *strides, *limits, shared * 0, shared * 0),
            {0: Expected(after), 1: Expected(after), 8: Expected(shared), 9: Expected(shared)},
        )  # fmt: skip


def _with_fractions(a: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return whole numbers; in float64 with fractions that float32 cannot represent, although their sums stay exact."""
    return a + 2.0**-30 * rng.integers(-9, 10, a.shape) if a.dtype == np.float64 else a


def products(dtype: str, rows: int, columns: int, depth: int, mma_rows: int = 0) -> Launch:
    rng = np.random.default_rng(5)
    a, b_nt, b_nn = (
        rng.integers(-9, 10, shape).astype(_wide(dtype))
        for shape in ((rows, depth), (columns, depth), (depth, columns))
    )
    a = _with_fractions(a, rng)
    c = (1000 * np.arange(rows)[:, None] + np.arange(columns)).astype(_wide(dtype))
    sizes = {"kRows": rows, "kColumns": columns, "kDepth": depth}
    return _tile(
        f"products {rows} x {columns} x {depth}", "products", dtype, mma_rows, (a, b_nt, b_nn, c * 0, c * 0),
        {3: Expected(c + a @ b_nt.T), 4: Expected(c + a @ b_nn)}, **sizes,
    )  # fmt: skip


def quotients(dtype: str) -> Launch:
    """Divide numbers of many magnitudes by numbers of at least 1, both with full mantissas, and some non-finite."""
    rows, columns = 64, 64
    rng = np.random.default_rng(7)
    numbers = (rng.normal(size=(rows, columns)) * 2.0 ** rng.integers(-20, 20, (rows, columns))).astype(dtype)
    by = (2.0 ** rng.uniform(0, 20, rows)).astype(dtype)
    by[:3] = 1, 2, np.inf
    numbers[3, :4] = 0, np.inf, -np.inf, np.nan
    with np.errstate(invalid="ignore"):
        right = numbers / by[:, None]
    return _tile(
        "quotients", "quotients", dtype, 0, (numbers, by, np.zeros_like(numbers)), {2: Expected(right)},
        kRows=rows, kColumns=columns,
    )  # fmt: skip


def transposed_products(dtype: str, first: int, last: int, mma_rows: int = 0) -> Launch:
    """Add a^T b over some rows to a matrix that is just large enough."""
    rows, columns, depth = 64, 64, 24
    rng = np.random.default_rng(6)
    a, b = (rng.integers(-9, 10, (depth, width)).astype(_wide(dtype)) for width in (rows, columns))
    a = _with_fractions(a, rng)
    a[:first], a[last:], b[:first], b[last:] = np.nan, np.nan, np.nan, np.nan
    to = np.full((rows + 3, 2 * columns + 1), SENTINEL, _wide(dtype))
    after = to.copy()
    height, width = rows - 5, columns - 3
    after[:height, 1 : 2 * width : 2] += (a[first:last].T @ b[first:last])[:height, :width]
    limits = [np.int32(x) for x in (first, last, height, width)]
    return _tile(
        f"a^T b of rows {first} to {last}", "transposed_products", dtype, mma_rows,
        (a, b, to, np.int64(to.shape[1]), *limits), {2: Expected(after)},
        kRows=rows, kColumns=columns, kDepth=depth,
    )  # fmt: skip


def tf32_products(number: int, rows: int, columns: int, depth: int, wide: str = "", has_nan: bool = False) -> Launch:
    """Multiply integers with exact products: with few bits, except `wide` operands, which tf32 cannot represent."""
    rng = np.random.default_rng(6)
    shapes = {"a": (rows, depth), "a_tn": (depth, rows), "b_nt": (columns, depth), "b_nn": (depth, columns)}
    a, a_tn, b_nt, b_nn = (
        rng.integers(-most, most + 1, shape).astype(np.float32)
        for shape, most in ((shape, 3000 if name in wide.split() else 3) for name, shape in shapes.items())
    )
    if has_nan:
        # the NaN that GPUs produce: rounding by addition to its bits would give -0
        a[5, 3] = np.uint32(0x7FFFFFFF).view(np.float32)
    nbytes = 4 * (2 * rows * depth + 2 * columns * depth + rows * columns)
    c_nt = a @ b_nt.T
    right = (c_nt, a @ b_nn, 1000 + a_tn.T @ b_nn, 1000 + c_nt @ b_nt, c_nt)
    return Launch(
        name=f"{number} products of tf32, {rows} x {columns} x {depth}, wide {wide}" + ", NaN" * has_nan,
        file="tf32", entry="products", block=128, shared_bytes=nbytes,
        constants={"kRows": rows, "kColumns": columns, "kDepth": depth}, tf32_products=number,
        arguments=(a, a_tn, b_nt, b_nn, *map(np.zeros_like, right)),
        expected={4 + place: Expected(values) for place, values in enumerate(right)},
    )  # fmt: skip


def tf32_places(columns: int) -> Launch:
    return Launch(
        name=f"places of {columns} floats", file="tf32", entry="places", block=32, tf32_products=1,
        constants={"kRows": 64, "kColumns": columns, "kDepth": 32},
        arguments=(np.zeros((16, columns), np.int32),), expected={},
    )  # fmt: skip


# ---- asynchronous copies and products of sm90 ----

HOPPER = "sm_90a"


def _swizzled(image: Any, width: int) -> Any:
    """Return bytes with 16-byte chunks permuted by a swizzle of rows of `width` bytes; 0 means no swizzle."""
    chunk = np.arange(image.size // 16)
    place = chunk ^ (chunk >> 3 & max(width // 16 - 1, 0))
    moved = np.empty_like(image.reshape(-1, 16))
    moved[place] = image.reshape(-1, 16)
    return moved.ravel()


def _inside(array: Any, start: tuple[int, ...], box: tuple[int, ...]) -> tuple[Any, Any]:
    """Return a box as an index of an array extended by a box at all ends, and whether elements are in the array."""
    index = np.ix_(*(np.arange(x, x + size) for x, size in zip(start, box)))
    return index, np.broadcast_arrays(*((0 <= x) & (x < size) for x, size in zip(index, array.shape)))


def _box(array: Any, start: tuple[int, ...], box: tuple[int, ...]) -> Any:
    """Return the contents of a box, with zeros outside the tensor."""
    index, inside = _inside(array, start, box)
    is_inside = np.logical_and.reduce(inside)
    held = array[tuple(np.clip(x, 0, size - 1) for x, size in zip(index, array.shape))]
    return np.where(is_inside, held, np.zeros((), array.dtype))


# (dtype, swizzle, shape, box): boxes of several heads and batch entries, and boxes that extend past all ends.
TILES: tuple[tuple[str, int, tuple[int, ...], tuple[int, ...]], ...] = (
    ("float16", 0, (2, 2, 19, 24), (1, 1, 8, 8)),
    ("float16", 32, (2, 2, 19, 24), (1, 2, 5, 16)),
    ("bfloat16", 64, (1, 3, 21, 40), (1, 1, 16, 32)),
    ("float16", 128, (2, 2, 37, 72), (1, 1, 24, 64)),
    ("bfloat16", 128, (2, 2, 37, 40), (1, 1, 24, 64)),
    ("float16", 128, (1, 1, 16, 64), (1, 1, 64, 64)),
    ("float32", 0, (2, 1, 19, 12), (1, 1, 9, 4)),
    ("float32", 128, (2, 1, 19, 36), (1, 1, 16, 32)),
    ("float16", 128, (2, 3, 2, 19, 64), (1, 1, 2, 16, 64)),
    ("bfloat16", 64, (2, 3, 2, 19, 32), (1, 2, 1, 16, 32)),
    ("float32", 32, (2, 3, 2, 9, 8), (2, 1, 2, 5, 8)),
)


def _places(dtype: str, shape: tuple[int, ...], box: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return starts of boxes: at the first element, in the middle, past the last and before the first."""
    rng = np.random.default_rng(len(shape))
    places = [(0,) * len(shape), tuple(size - 1 for size in shape), tuple(1 - size for size in box), shape]
    places += [tuple(map(int, rng.integers(-3, np.array(shape) + 1))) for _ in range(3)]
    run = 16 // np.dtype(_numpy(dtype)).itemsize  # rows of a box start at multiples of 16 bytes
    return [(*place[:-1], place[-1] // run * run) for place in places]


def _padded(shape: tuple[int, ...], dtype: str) -> Any:
    """Return small numbers in an array with gaps along all axes except the last."""
    outer = tuple(size + 1 for size in shape[:-1])
    columns = -(-shape[-1] // 16) * 16
    numbers = np.random.default_rng(7).integers(1, 64, (*outer, columns)).astype(_numpy(dtype))
    return numbers[tuple(map(slice, shape))]


def _tiles(entry: str, name: str, array: Any, case: Any, places: Any, *rest: Any, expected: dict[int, Any]) -> Launch:
    dtype, swizzle, shape, box = case
    coordinates = np.ascontiguousarray(np.array(places, np.int32)[:, ::-1])
    bytes_ = int(np.prod(box)) * array.itemsize
    return Launch(
        name=f"{name} {dtype} {shape} in {box} swizzled {swizzle}", file="tma", entry=entry, block=128,
        architecture=HOPPER, shared_bytes=bytes_ + 16, constants={"kRank": len(shape)},
        arguments=(TensorMap(1, box, swizzle), array, coordinates, np.int32(len(places)), np.int32(bytes_), *rest),
        expected={place: Expected(values) for place, values in expected.items()},
    )  # fmt: skip


def tile_loads(*case: Any, axis: int | None = None) -> Launch:
    """Load boxes of an array, which is broadcast along `axis` unless that is None."""
    dtype, swizzle, shape, box = case
    array, places = _padded(shape, dtype), _places(dtype, shape, box)
    if axis is not None:
        array = np.broadcast_to(array.take([0], axis), shape)
    boxes = [_box(array, place, box) for place in places]
    right = np.stack([_swizzled(np.ascontiguousarray(each).view(np.uint8).ravel(), swizzle) for each in boxes])
    name = "load" if axis is None else f"load along broadcast axis {axis}"
    return _tiles("loads", name, array, case, places, right * 0, expected={5: right})


def tile_stores(adds: bool, *case: Any) -> Launch:
    dtype, swizzle, shape, box = case
    array = _padded(shape, dtype)
    # stores must not start before the first element
    places = [tuple(max(x, 0) for x in place) for place in _places(dtype, shape, box)]
    after = array.copy()
    rng = np.random.default_rng(8)
    tiles = []
    for place in places:
        values = rng.integers(1, 64, box).astype(_numpy(dtype))
        tiles.append(_swizzled(np.ascontiguousarray(values).view(np.uint8).ravel(), swizzle))
        index, inside = _inside(array, place, box)
        is_inside = np.logical_and.reduce(inside)
        targets = tuple(np.broadcast_arrays(*index)[axis][is_inside] for axis in range(array.ndim))
        after[targets] = values[is_inside] + (after[targets] if adds else np.zeros((), array.dtype))
    return _tiles(
        "stores", "add" if adds else "store", array, case, places, np.stack(tiles), np.int32(adds), expected={1: after}
    )


def chunk_stores(columns: int) -> Launch:
    """Store rows that end within a 16-byte chunk; the entire chunk is written."""
    array, box = np.full((1, 1, 1, 20, 64), SENTINEL).astype(np.float16), (1, 1, 1, 16, 64)
    values = np.random.default_rng(8).integers(1, 64, (16, 64)).astype(np.float16)
    after = array.copy()
    written = -(-columns // 8) * 8
    after[0, 0, 0, :16, :written] = values[:, :written]
    tiles = _swizzled(values.view(np.uint8).ravel(), 128)[None]
    return Launch(
        name=f"store {columns} columns", file="tma", entry="stores", block=128, architecture=HOPPER,
        shared_bytes=2048 + 16, constants={"kRank": 5},
        arguments=(
            TensorMap(1, box, 128, columns), array, np.zeros((1, 5), np.int32), np.int32(1), np.int32(2048), tiles,
            np.int32(0),
        ),
        expected={1: Expected(after)},
    )  # fmt: skip


def bulk(name: str = "runs of bytes", unit: float = 1) -> Launch:
    half = 1040
    numbers = (unit * np.random.default_rng(9).integers(-99, 99, half // 2)).astype(np.float32)
    first, second = np.split(numbers, 2)
    sums, ids = 3 * numbers, np.arange(64).reshape(4, 16).sum(axis=0)
    fours = np.stack([ids, 2 * ids, -ids, np.full(16, 4)], axis=1)
    return Launch(
        name=name, file="bulk", entry="bulk", block=64, architecture=HOPPER, shared_bytes=2 * half + 8,
        arguments=(numbers, numbers * 0, sums, np.int32(half), np.ones((16, 4), np.float32)),
        expected={1: Expected(numbers), 2: Expected(sums + np.tile(first + second, 2)), 4: Expected(1 + fours)},
    )  # fmt: skip


def diagonals() -> Launch:
    numbers = np.random.default_rng(11).integers(-9, 10, (16, 16)).astype(np.float32)
    return Launch(
        name="diagonals", file="diagonals", entry="diagonals", block=32,
        arguments=(numbers, np.full(32, np.nan, np.float32)),
        expected={1: Expected(np.array([np.trace(numbers, -distance) for distance in range(-16, 16)], np.float32))},
    )  # fmt: skip


def turns(places: int, num_tiles: int, num_groups: int, ahead: int, behind: int) -> Launch:
    order = finishing_order(DqSemaphoreOrder(places, ahead, behind, 0), num_groups, num_tiles)
    numbers = (places, num_tiles, num_groups, ahead, behind)
    return Launch(
        name=f"turns of {places} places, {num_tiles} tiles, {ahead} rounds ahead, {behind} behind", file="turns",
        entry="turns", block=64, arguments=(np.zeros((len(order), 2), np.int32), *map(np.int32, numbers)),
        expected={0: Expected(np.array(order))},
    )  # fmt: skip


def counts() -> Launch:
    zero = np.zeros(1, np.int32)
    return Launch(
        name="counts", file="turns", entry="counts", block=64, architecture=HOPPER,
        arguments=(zero, zero, np.zeros(32, np.int32)),
        expected={0: Expected(np.array([13])), 1: Expected(np.array([3])), 2: Expected(np.full(32, 2))},
    )  # fmt: skip


def ring() -> Launch:
    count = 11
    numbers = np.random.default_rng(10).integers(-9, 10, (count, 128)).astype(np.int32)
    sums = np.zeros(256, np.int32)
    for i in range(count):
        sums = 3 * sums + numbers[i, (np.arange(256) * 7 + i) % 128]
    return Launch(
        name="ring of barriers", file="ring", entry="ring", block=384, architecture=HOPPER, shared_bytes=3 * 528,
        arguments=(numbers, np.int32(count), sums * 0, np.zeros(12, np.int32)),
        expected={2: Expected(sums), 3: Expected(np.ones(12))},
    )  # fmt: skip


_OPERAND = np.dtype([("swizzle", "i4"), ("leading", "i4"), ("stride", "i4"), ("starts", "i4", 4)])
_FORM = np.dtype([("a_major", "i4"), ("b_major", "i4"), ("a", _OPERAND), ("b", _OPERAND)])
_SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}  # bytes of a row -> code in descriptors


def _operand(matrix: Any, major: int, width: int) -> tuple[Any, Any]:
    """Return the bytes of a matrix [rows, 64] in shared memory, and how wgmma locates the next 16 columns."""
    rows, depth = matrix.shape
    row_bytes = width or 16
    across = row_bytes // 2
    # the last axis of `dense` lies in the rows of an atom
    dense, other = (matrix, rows) if major == 0 else (matrix.T, depth)
    padded = np.zeros((other, -(-dense.shape[1] // across) * across), matrix.dtype)
    padded[:, : dense.shape[1]] = dense
    columns = padded.reshape(other, -1, across).swapaxes(0, 1)  # atoms are stacked, one column of atoms after another
    image = _swizzled(np.ascontiguousarray(columns).view(np.uint8).ravel(), width)
    atom, column = 8 * row_bytes, other * row_bytes
    if major == 0:
        leading, stride = column, atom
        starts = [16 * step // across * column + 16 * step % across * 2 for step in range(4)]
    else:
        leading, stride = (column, atom) if width else (atom, column)
        starts = [16 * step * row_bytes for step in range(4)]
    return image, np.array((_SWIZZLES[width], leading, stride, starts), _OPERAND)


def group_products(dtype: str, columns: int, adds: bool, unit: float = 1.0) -> Launch:
    """Multiply small integers; those of a, and of the sums before, are multiplied by a power of two."""
    rng = np.random.default_rng(columns)
    depth = 128 // np.dtype(_numpy(dtype)).itemsize
    a, b = (rng.integers(-8, 9, shape).astype(_numpy(dtype)) for shape in ((64, depth), (columns, depth)))
    a = (a * np.array(unit, a.dtype)).astype(a.dtype)
    before = (unit * rng.integers(-99, 99, (64, columns))).astype(np.float32)
    after = (a.astype(float) @ b.astype(float).T + (before if adds else 0)).astype(np.float32)
    a, b = a.view(np.uint16), b.view(np.uint16)  # two 8-bit elements are copied as one 16-bit element
    forms, images = [], []
    majors = [(0, 0), (2, 0)] if depth == 128 else itertools.product((0, 1, 2), (0, 1))
    for (a_major, b_major), width in itertools.product(majors, _SWIZZLES):
        (a_image, a_form), (b_image, b_form) = _operand(a, a_major % 2, width), _operand(b, b_major, width)
        forms.append(np.array((a_major, b_major, a_form, b_form), _FORM))
        image = np.zeros(8192 + 256 * 128, np.uint8)
        image[: a_image.size], image[8192 : 8192 + b_image.size] = a_image, b_image
        images.append(image)
    # Lane 4 g + t of warp w holds rows 16 w + g and + 8, and columns from 2 t and from 2 t + 8 of each 16.
    pairs = np.ascontiguousarray(a).view(np.uint32).reshape(4, 2, 8, 4, 2, 4)  # axes: warp, half, g, step, half, t
    fragments = np.ascontiguousarray(pairs.transpose(3, 0, 2, 5, 4, 1))  # axes: step, warp, g, t, then a[0] to a[3]
    right = np.broadcast_to(after, (len(forms), 64, columns))
    return Launch(
        name=f"wgmma {dtype} of {columns} columns, in units of {unit}" + ", adding" * adds, file="wgmma",
        entry="products", block=128, architecture=HOPPER, shared_bytes=images[0].size,
        constants={"T": (ELEMENTS | E4M3)[dtype], "kN": columns},
        arguments=(np.stack(forms).view(np.uint8).reshape(len(forms), -1), np.int32(len(forms)), np.stack(images),
                   np.int32(images[0].size), fragments, before, np.int32(adds), right * 0),
        expected={7: Expected(right)},
    )  # fmt: skip


def e4m3_sums(a: Any, b: Any, before: Any) -> Any:
    """Compute `before` plus the product on an H100's tensor cores, for bytes a [..., rows, 32] and b [..., columns,
    32].

    Terms are truncated below 2^-13 of the largest, and the sum to 13 bits of mantissa; subnormals have exponent -6.
    """
    numbers, exponents = [], []
    for bits in (a, b):
        numbers.append(bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64))
        exponents.append(np.where(bits & 0x7F, np.maximum((bits >> 3 & 15).astype(int), 1) - 7, -100))
    products = numbers[0][..., :, None, :] * numbers[1][..., None, :, :]
    of_products = (exponents[0][..., :, None, :] + exponents[1][..., None, :, :]).max(axis=-1)
    of_before = np.where(before == 0, -100, np.frexp(before)[1] - 1)
    unit = np.exp2(np.maximum(of_products, of_before) - 13.0)
    sums = (np.trunc(products / unit[..., None]).sum(axis=-1) + np.trunc(before / unit)) * unit
    return (sums.astype(np.float32).view(np.uint32) & ~np.uint32(2**10 - 1)).view(np.float32)


def e4m3_accumulation(name: str) -> Launch:
    """Add one product to accumulators: of arbitrary, few, equal, positive, or subnormal numbers."""
    rng, shape = np.random.default_rng(7), (2, 64, 32)
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[codes & 0x7F != 0x7F]
    normal = rng.standard_normal((2, *shape)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    a, b = {
        "any": rng.choice(codes, (2, *shape)),
        "few": np.where(rng.random((2, *shape)) < 0.15, rng.choice(codes, (2, *shape)), np.uint8(0)),
        "normal": normal,
        "positive": normal & 0x7F,
        "subnormal": rng.choice(codes[codes & 0x7F < 16], (2, *shape)),
    }[name]
    before = (rng.standard_normal((2, 64, 64)) * np.exp2(rng.integers(-20, 20, (2, 64, 64)))).astype(np.float32)
    before[0, ::3] = 0
    right = e4m3_sums(a, b, before)
    return Launch(
        name=f"e4m3 sums of {name} numbers", file="wgmma", entry="sums", block=128, architecture=HOPPER,
        shared_bytes=64 * 32, constants={"T": E4M3["float8_e4m3fn"], "kN": 64},
        arguments=(a, b, before, np.zeros_like(before), np.int32(len(a))), expected={3: Expected(right)},
    )  # fmt: skip


def two_e4m3_products(depth: int, keys: int, values: int) -> Launch:
    """Multiply integers with products that, rounded to e4m3 and multiplied again, are exact."""
    rng = np.random.default_rng(8)
    q = np.zeros((64, depth), np.float32)
    q[np.arange(64), rng.integers(0, depth, 64)] = rng.choice([1, 2], 64)  # scores are representable in e4m3
    k, v = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((keys, depth), (keys, values)))
    place = np.arange(keys)
    column = place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2
    a, b, c = (x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for x in (q, k, v[column].T))
    right = (column, q @ k.T, q @ k.T @ v)
    return Launch(
        name=f"two products of e4m3, {depth} x {keys} x {values}", file="fp8", entry="two_products", block=128,
        architecture=HOPPER, shared_bytes=64 * depth + keys * (depth + values),
        constants={"kDepth": depth, "kKeys": keys, "kValues": values},
        arguments=(a, b, np.ascontiguousarray(c), np.zeros(keys, np.int32), *(0 * x for x in right[1:])),
        expected={3 + i: Expected(x) for i, x in enumerate(right)},
    )  # fmt: skip


def e4m3_packs() -> Launch:
    """Round floats at and around all e4m3 numbers and their midpoints, and floats of arbitrary bits."""
    number = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:-1]
    edges = np.concatenate([number, (number[:-1] + number[1:]) / 2, np.float32([464, 480, 1e30, np.inf])])
    near = (edges.view(np.int32)[:, None] + np.arange(-1, 2, dtype=np.int32)).ravel()[1:].view(np.float32)
    drawn = np.random.default_rng(5).integers(0, 2**32, 1000, np.uint32).view(np.float32)
    x = np.concatenate([near, -near, drawn])
    x = np.resize(x, -(-x.size // 4) * 4)
    with np.errstate(invalid="ignore", over="ignore"):
        right = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    right = np.where(np.isnan(x), np.uint8(0x7F), right)
    return Launch(
        name="floats as e4m3", file="e4m3", entry="packs", block=128, architecture=HOPPER,
        arguments=(x, np.zeros(x.size // 4, np.uint32), np.int32(x.size // 4)),
        expected={1: Expected(right.view(np.uint32))},
    )  # fmt: skip


# ---- what tiles visit ----


class Walk(NamedTuple):
    """A probe of a plan's steps: its launch, and the plan with its tiles."""

    plan: KernelPlan
    launch: Launch


def with_specs(plan: KernelPlan, specs: dict[str, KernelSpec]) -> KernelPlan:
    """Return the plan with other kernels for the same entries."""
    assert plan.family is not None and plan.kernels is not None
    choose, family = plan.family.specs, type(plan.family)()
    setattr(family, "specs", lambda *args, **options: choose(*args, **options) | specs)
    request = Request.over(plan.problem, plan.device, plan.work, plan.kernels.is_repeatable)
    kernels = family.launches(request, plan.work)
    return replace(plan, kernels=kernels)


def walk(structure: Structure, query_tile: int, key_tile: int) -> Walk:
    """Make a probe of all steps: query tiles that step over keys by `key_tile`, and the reverse."""
    example = structure.example()
    plan = cuflash.plan(example.q, example.k, example.v, mask=example.mask, executor="sim", deterministic=True)._plan
    entries = ("forward", "backward_columns")
    num_batch, tile = plan.problem.mask_shape.num_batch, {"block_q": query_tile, "block_kv": key_tile}
    cut = with_specs(plan, {entry: replace(plan.specs[entry], **tile) for entry in entries}).kernels
    launches = cut.forward.launches | cut.backward.launches
    grids = [launches[entry].grid(num_batch) for entry in entries]
    shape = (plan.problem.mask_shape.num_batch, *plan.problem.mask_shape[1:])
    allowed = np.broadcast_to(example.allowed, (*plan.problem.mask_shape.batch, *shape[1:])).reshape(shape)
    capacity = 1 << 14
    arguments = (
        Record(plan), *map(np.int32, grids), np.zeros(1, np.int32), np.zeros((capacity, 8), np.int32),
        np.int32(capacity), np.zeros(shape, np.int32), np.zeros(shape, np.int32),
        np.full((max(grids), 2, 4), -1, np.int32),
    )  # fmt: skip
    sizes = {"kQueryTile": query_tile, "kKeyStep": key_tile, "kKeyTile": key_tile, "kQueryStep": query_tile}
    launch = Launch(
        name=f"steps {type(structure.mask).__name__} {query_tile} x {key_tile}", file="steps", entry="steps", block=32,
        grid=max(grids), arguments=arguments, constants=sizes,
        expected={6: Expected(allowed), 7: Expected(allowed)},
    )  # fmt: skip
    return Walk(plan, launch)


def sequence_tiles(mask: masks.Mask, seqlen_q: int, seqlen_kv: int, height: int, width: int) -> Walk:
    """Make a probe of the tiles of sequences, with `height` queries and steps of `width` keys."""
    example = Structure(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, mask=mask).example()
    plan = cuflash.plan(example.q, example.k, example.v, mask=example.mask, executor="sim")._plan
    launch = Launch(
        name=f"tiles of {type(mask).__name__}", file="sequence_tiles", entry="sequence_tiles", block=32,
        arguments=(Record(plan), np.zeros((seqlen_q, 2), np.int32), np.zeros(-(-seqlen_q // height), np.int32)),
        constants={"kHeight": height, "kWidth": width}, expected={},
    )  # fmt: skip
    return Walk(plan, launch)


def _random(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).random(shape) < 0.3


def _steps_of(structures: dict[str, Structure]) -> dict[str, tuple[Structure, int, int]]:
    tiles = ((16, 16), (32, 8), (64, 32))
    return {
        f"{name}, {query_tile} x {key_tile}": (structure, query_tile, key_tile)
        for name, structure in structures.items()
        for query_tile, key_tile in tiles
    }


WALKS = _steps_of(
    {
        "no mask": Structure(q_batch=(2,), num_heads=2, seqlen_q=70, seqlen_kv=45),
        "causal": Structure(num_heads=2, seqlen_q=100, seqlen_kv=130, mask=masks.Causal("bottom_right")),
        "causal, more queries": Structure(seqlen_q=130, seqlen_kv=100, mask=masks.Causal("bottom_right")),
        "window": Structure(seqlen_q=200, seqlen_kv=200, mask=masks.SlidingWindow(40, 20)),
        "narrow window": Structure(seqlen_q=150, seqlen_kv=150, mask=masks.SlidingWindow(3, 0)),
        "lengths of batch entries": Structure(
            q_batch=(3,), k_batch=(3,), v_batch=(3,), num_heads=4, num_kv_heads=2, seqlen_q=65, seqlen_kv=90,
            mask=masks.Lengths(q=np.array([65, 0, 20]), kv=np.array([90, 40, 0])),
        ),
        "documents": Structure(seqlen_q=140, seqlen_kv=140, mask=masks.Documents(np.arange(140) // 33)),
        "bits": Structure(
            num_heads=2, num_kv_heads=1, seqlen_q=90, seqlen_kv=100, mask=masks.Dense(_random(2, 90, 100))
        ),
        "blocks of 16": Structure(
            num_heads=2, seqlen_q=100, seqlen_kv=90, mask=masks.BlockPattern(_random(2, 7, 6), 16)
        ),
        "blocks of 24": Structure(seqlen_q=100, seqlen_kv=140, mask=masks.BlockPattern(_random(5, 6), 24)),
        "blocks of 100 x 64, causal": Structure(
            q_batch=(2,), k_batch=(1,), num_heads=2, seqlen_q=250, seqlen_kv=250,
            mask=masks.BlockPattern(_random(2, 2, 3, 4), (100, 64)) & masks.Causal(),
        ),
        "butterfly": Structure(seqlen_q=128, seqlen_kv=128, mask=patterns.butterfly(128, block=16) & masks.Causal()),
    }
)  # fmt: skip


def wrong_steps(plan: KernelPlan, records: Any) -> list[str]:
    """List errors of the steps of a walk, other than their elements: order, width, kinds, and visited blocks."""
    work, allowed = plan.work, plan.mask.toarray(**plan.problem.mask_shape._asdict())
    allowed = allowed.reshape(plan.problem.mask_shape.num_batch, *allowed.shape[-3:])
    wrong = []
    tiles: dict[tuple[int, ...], list[Any]] = {}
    for entry, head, first, last, start, stop, kind, side in records.tolist():
        tiles.setdefault((side, entry, head, first, last), []).append((start, stop, kind))
    for (side, b, h, first, last), steps in tiles.items():
        segments = (work.column if side else work.row)(b, h, first, last)
        seen = np.zeros(max(plan.problem.seqlen_q, plan.problem.seqlen_kv), bool)
        for start, stop, kind in steps:
            part = allowed[b, h, start:stop, first:last] if side else allowed[b, h, first:last, start:stop]
            if not start < stop or seen[start:stop].any():
                wrong.append(f"{side, b, h, first, last} visits {start}:{stop} twice, or it is empty")
            if kind == 1 and not part.all():
                wrong.append(f"{side, b, h, first, last} calls {start}:{stop} full")
            seen[start:stop] = True
        requested = np.zeros_like(seen)
        for segment in segments:
            requested[segment.start : segment.stop] = True
        # A listed block is visited entirely, while a segment of bits is limited to keys that some row uses.
        more = seen & ~requested
        if (requested & ~seen).any() or (more.any() and not isinstance(work, ListedWork)):
            wrong.append(f"{side, b, h, first, last} visits {steps}, the work list has {segments}")
        if [start for start, _, _ in steps] != sorted(start for start, _, _ in steps):
            wrong.append(f"{side, b, h, first, last} visits {steps} out of order")
    return wrong


def wrong_tiles(plan: KernelPlan, tiles: Any) -> list[str]:
    """List errors of a grid's tiles: each query or key must be in one tile, and a list's longest tiles must come first.

    `tiles` [blocks, 2, 4] holds batch entry, head, first and last row of each block's query tile and key tile.
    """
    wrong = []
    problem, work = plan.problem, plan.work
    for side, (length, group) in enumerate(((problem.seqlen_q, 1), (problem.seqlen_kv, problem.group_size))):
        cut = tiles[tiles[:, side, 0] >= 0, side]
        covered = np.zeros((problem.mask_shape.num_batch, problem.num_heads // group, length), int)
        for entry, head, first, last in cut.tolist():
            covered[entry, head // group, first:last] += 1
        if (covered != 1).any():
            wrong.append(f"{side}: positions lie in other than one tile: {np.argwhere(covered != 1).tolist()}")
        if not isinstance(work, ListedWork):
            continue
        pointers = work.lists["column_pointers" if side else "row_pointers"]
        block, num_blocks = ((work.block_q, work.index.num_q_blocks), (work.block_kv, work.index.num_kv_blocks))[side]
        matrix = np.array([np.dot(work.owner(b, h), (work.index.num_heads, 1)) for b, h in cut[:, :2].tolist()])
        row = matrix * num_blocks + cut[:, 2] // block
        turns = np.diff(pointers)[row].reshape(-1, covered[..., 0].size)
        places = cut[:, :2].reshape(*turns.shape, 2)
        if (places != places[0]).any() or len(np.unique(places[0], axis=0)) != len(places[0]):
            wrong.append(f"{side}: batch entries and heads do not take turns: {places.tolist()}")
        elif (np.diff(turns, axis=0) > 0).any():
            wrong.append(f"{side}: entries of the tiles, turn by turn, are {turns.tolist()}")
    return wrong


FRAGMENTS = ("float64", 8)  # element type and mma_rows of tiles in the layouts of tensor cores
TF32 = (
    tf32_products(3, 32, 16, 32, "a a_tn"),
    tf32_products(1, 64, 32, 64),
    tf32_products(1, 64, 32, 32, has_nan=True),
    tf32_products(3, 64, 96, 32, "a a_tn"),
    tf32_products(3, 128, 64, 32, "b_nn"),
)
LAUNCHES = (
    matrices(),
    mma(),
    mma((2.0**-24, 2.0**-133, 2.0**-133)),
    *map(mma_double, (8, 16)),
    words(),
    atomics(),
    *map(exact_sums, ("float32", "float64")),
    math(),
    subnormals(),
    copy(),
    *(tile_loads(*case) for case in TILES),
    *(tile_loads(*TILES[3], axis=axis) for axis in (0, 1)),
    *(tile_stores(adds, *case) for case in TILES for adds in (False, True)),
    *map(chunk_stores, (1, 20, 64)),
    bulk(),
    bulk("runs of subnormal numbers", 2.0**-140),
    diagonals(),
    ring(),
    *(turns(*way) for way in ((1, 2, 4, 0, 1), (3, 5, 9, 2, 3), (4, 8, 6, 0, 4), (5, 3, 8, 1, 2), (2, 9, 7, 3, 4))),
    counts(),
    *(group_products(dtype, columns, columns % 32 == 0)
      for columns, dtype in in_turn((*range(16, 257, 32), 40, *range(32, 257, 32)), ("float16", "bfloat16"))),
    *(group_products("float8_e4m3fn", columns, columns % 32 == 0) for columns in (16, 40, 128)),
    group_products("float16", 16, True, 2.0**-24),
    group_products("bfloat16", 16, True, 2.0**-133),
    e4m3_packs(),
    *(two_e4m3_products(*sizes) for sizes in ((64, 64, 64), (128, 128, 128))),
    *map(e4m3_accumulation, ("any", "few", "normal", "positive", "subnormal")),
    *(maps(*way) for way in (("float32",), ("float64",), FRAGMENTS)),
    *(launch for way in (*((dtype, 0) for dtype in ELEMENTS), FRAGMENTS) for launch in loads(*way)),
    *(launch for way in (*((dtype, 0) for dtype in ELEMENTS), FRAGMENTS) for launch in stores(*way)),
    *(products("float32", *sizes) for sizes in ((32, 64, 40), (64, 32, 8))),
    *TF32,
    *(products("float64", *sizes) for sizes in ((16, 48, 24), (64, 40, 24, 8), (32, 16, 8, 16), (128, 24, 40, 16))),
    *map(quotients, ("float32", "float64")),
    *(transposed_products(dtype, *rows, mma_rows)
      for dtype, mma_rows in (("float32", 0), ("float64", 0), FRAGMENTS, ("float64", 16))
      for rows in ((0, 24), (5, 18), (7, 7))),
)  # fmt: skip
