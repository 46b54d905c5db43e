"""The three executors behind one interface: NumPy arrays are arguments and results on any of them."""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuflash import masks, sim
from cuflash.executors.sim import Simulator
from cuflash.planning.plan import KernelPlan
from cuflash.planning.problem import Problem
from cuflash.testing import Example, Structure, assert_within_bounds, examples
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash

DTYPES = ("float16", "bfloat16", "float32", "float64")
HALVES = DTYPES[:2]


@functools.cache
def _why_no_bfloat16() -> str | None:
    """Return why CuPy lacks bfloat16: only recent versions accept ml_dtypes' dtype, if ml_dtypes is installed."""
    import cupy

    try:
        ones = cupy.asarray(np.ones(3, ml_dtypes.bfloat16))
        cupy.empty(3, ml_dtypes.bfloat16)[...] = ones
        return None if ones.astype(np.float32).sum().item() == 3 else "CuPy sums bfloat16 wrongly"
    except Exception as error:  # any error that this version of CuPy raises for an unknown dtype
        return f"CuPy {cupy.__version__} has no bfloat16 ({error})"


def to_device(array: Any) -> Any:
    """Return a CuPy array with the same strides and, in the gaps of its memory, the same bytes."""
    import cupy

    if array is None:
        return None
    if array.dtype == ml_dtypes.bfloat16 and (reason := _why_no_bfloat16()):
        pytest.skip(reason)
    if not array.size:
        return cupy.empty(array.shape, array.dtype)
    low, high = np.lib.array_utils.byte_bounds(array)
    memory = np.frombuffer((ctypes.c_char * (high - low)).from_address(low), np.uint8)
    start = cupy.asarray(memory).data + (array.ctypes.data - low)
    return cupy.ndarray(array.shape, array.dtype, start, array.strides)


@dataclass(frozen=True)
class Run:
    """Settings of calls on one executor.

    Attributes
    ----------
    executor : str
    drawn : dict
        Limits for drawn examples in a short run; a long run has none.
    most_examples : int, optional
        Largest number of examples in a short run.
    deterministic : bool
        The option of all calls.
    kernel : str
        The family of kernels that all calls request.
    """

    executor: str
    drawn: tuple[tuple[str, Any], ...] = ()
    most_examples: int | None = None
    deterministic: bool = False
    kernel: str = "auto"

    def __str__(self) -> str:
        kernel = "" if self.kernel == "auto" else f"-{self.kernel}"
        return f"{self.executor}{kernel}" + "-deterministic" * self.deterministic

    @property
    def options(self) -> dict[str, Any]:
        return {"executor": self.executor, "deterministic": self.deterministic, "kernel": self.kernel}

    @property
    def is_on_device(self) -> bool:
        return self.executor == "gpu"

    def put(self, array: Any) -> Any:
        return to_device(array) if self.is_on_device else array

    def get(self, array: Any) -> Any:
        return array.get() if self.is_on_device else array

    def put_mask(self, mask: Any, *arrays: Any) -> Any:
        """Put a mask on the device of the call's arrays; as blocks if ids are unsorted, which no device can detect."""
        if not self.is_on_device or mask is None:
            return mask
        import cupy

        if isinstance(mask, np.ndarray):
            return cupy.asarray(mask)
        if _is_unsorted(mask):
            return cuflash.BlockIndex.from_mask(mask, block=32, **Problem.of(*arrays).mask_shape._asdict())
        return mask.to(cupy.asarray)

    def kernel_plan(self, example: Example, **options: Any) -> KernelPlan:
        """Return a plan for kernels, with block lists that the host creates once, together with the plan."""
        shapes = [cuflash.ShapeDtype(x.shape, x.dtype) for x in (example.q, example.k, example.v)]
        options = {"scale": example.scale, "precision": example.precision, **self.options, **options}
        return cuflash.plan(*shapes, mask=example.mask, **options)._plan

    def attention(self, q: Any, k: Any, v: Any, *, mask: Any = None, **options: Any) -> Any:
        arrays, mask = [self.put(x) for x in (q, k, v)], self.put_mask(mask, q, k, v)
        output = cuflash.attention(*arrays, mask=mask, **self.options, **options)
        return tuple(self.get(x) for x in output) if isinstance(output, tuple) else self.get(output)

    def attend(self, q: Any, k: Any, v: Any, *, mask: Any, scale: float | None) -> tuple[Any, Any]:
        o, lse = self.attention(q, k, v, mask=mask, scale=scale, return_lse=True)
        return o, lse

    def pull(self, q: Any, k: Any, v: Any, do: Any, *, dlse: Any, mask: Any, scale: float | None) -> tuple[Any, ...]:
        arrays, mask = [self.put(x) for x in (q, k, v)], self.put_mask(mask, q, k, v)
        _, vjp = cuflash.attention_vjp(*arrays, mask=mask, scale=scale, **self.options)
        return tuple(self.get(x) for x in vjp(self.put(do), self.put(dlse)))

    def everything(self, example: Example) -> dict[str, Any]:
        """Return all results of a call, with the drawn mask object, which has closed forms."""
        q, k, v, do, dlse = (self.put(getattr(example, name)) for name in ("q", "k", "v", "do", "dlse"))
        sink = {} if example.sink is None else {"sink": self.put(example.sink), "wrt": "sink"}
        mask = self.put_mask(example.mask, example.q, example.k, example.v)
        options = {"mask": mask, "scale": example.scale, "precision": example.precision, "return_lse": True}
        options |= {} if example.dropout is None else {"dropout": example.dropout}
        (o, lse), vjp = cuflash.attention_vjp(q, k, v, **options, **sink, **self.options)
        gradients = vjp(do, dlse)
        results = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients)))
        results |= {f"d{name}": gradients[name] for name in gradients.others}
        arrays = {name: self.get(x) for name, x in results.items()}
        assert all(isinstance(x, np.ndarray) for x in arrays.values()), "a result without axes is an array too"
        return arrays

    def examples(self, **drawn: Any) -> st.SearchStrategy[Example]:
        if self.is_on_device and _why_no_bfloat16():
            drawn["dtypes"] = [name for name in DTYPES if name != "bfloat16"]
        if self.kernel == "sm90":
            drawn["dtypes"] = [name for name in drawn.get("dtypes", DTYPES) if name in HALVES]
        if not is_long() and self.executor == "sim" and "float16" in (names := drawn.get("dtypes", DTYPES)):
            drawn["dtypes"] = [name for name in names if name != "bfloat16"]
        return examples(**drawn | ({} if is_long() else dict(self.drawn))).map(self.rounded)

    def rounded(self, example: Example) -> Example:
        """Return an example with the dtype to which kernels round P and dS: 16-bit elements on tensor cores."""
        if self.executor == "cpu" or example.q.dtype.itemsize > 2:
            return example
        return example.but(product_dtype=example.q.dtype)

    @property
    def settings(self) -> settings:
        profile = settings.default
        if is_long() or self.most_examples is None:
            return profile
        return settings(profile, max_examples=min(self.most_examples, profile.max_examples))


def check_simulated(kernel: str, structure: Structure, **options: Any) -> None:
    """Assert that all results of a family's kernels, on the simulator, are within their bounds."""
    run = replace(SIM, kernel=kernel, **options)
    example = run.rounded(structure.example())
    assert_within_bounds(example, **run.everything(example))


def _is_unsorted(mask: masks.Mask) -> bool:
    if isinstance(mask, masks.Documents):
        return any(ids is not None and (np.diff(ids.astype(np.int64)) < 0).any() for ids in (mask.q_ids, mask.kv_ids))
    inner = getattr(mask, "operands", None) or [getattr(mask, "operand", None)]
    return any(_is_unsorted(each) for each in inner if each is not None)


def hostile_schedules(name: str, most: int = 2) -> list[sim.Schedule]:
    """Return schedules with each order of warps, and with copies that land late or at random.

    A short run uses `most` of them, which depend on the name, so that a test's names together cover them.
    """
    orders = itertools.product(("round_robin", "random", "priorities", "first_warp", "last_warp"), ("late", "random"))
    every = [
        sim.Schedule(seed=seed, order=order, copies=copies, shuffle_lanes=bool(seed % 2))
        for seed, (order, copies) in enumerate(orders)
    ]
    first = zlib.crc32(name.encode())
    return every if is_long() else [every[(first + 3 * number) % len(every)] for number in range(most)]


def in_turn(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations of some axes; in a short run, the entries of the longest axis, each with one of the
    others.

    All entries of each axis occur: "abcd" and (16, 32) become a 16, b 32, c 16 and d 32.
    """
    every = [list(axis) for axis in axes]
    if is_long():
        return list(itertools.product(*every))
    return [tuple(axis[number % len(axis)] for axis in every) for number in range(max(map(len, every)))]


def blocks_together(name: str, resident_blocks: int = 3, most: int = 2) -> list[Simulator]:
    """Return simulators that run blocks concurrently under hostile schedules, where races between blocks are errors."""
    return [
        Simulator(replace(schedule, resident_blocks=resident_blocks), "blocks")
        for schedule in hostile_schedules(name, most)
    ]


def is_long() -> bool:
    return settings.default.max_examples > 100


# Building a kernel for the simulator takes a second for every dtype, tile and range of dims: few of these. Kernels of
# bfloat16 differ from those of float16 only by conversions, and are run by tests whose examples are not drawn.
SIM = Run("sim", (("widest", 32), ("most_scores", 1 << 13), ("most_rows", 400)), most_examples=3)
GPU = Run("gpu", (("widest", 32),), most_examples=15)
CPU = Run("cpu")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++: apt install g++")
RUNS = (CPU, pytest.param(SIM, marks=needs_compiler), pytest.param(GPU, marks=pytest.mark.gpu))
# `deterministic=True` changes kernels of gradients only: half as many examples.
DETERMINISTIC = (
    pytest.param(replace(SIM, deterministic=True, most_examples=2), marks=needs_compiler),
    pytest.param(replace(GPU, deterministic=True), marks=pytest.mark.gpu),
)
KERNELS = (*RUNS[1:], *DETERMINISTIC)

# For tests of results other than gradients, which `deterministic=True` does not change.
on_sim_and_gpu = pytest.mark.parametrize("run", RUNS[1:], ids=str)

on_every_executor = pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run))
on_every_backward = pytest.mark.parametrize("run", (*RUNS, *DETERMINISTIC), ids=lambda run: str(run))
on_every_deterministic_backward = pytest.mark.parametrize("run", (CPU, *DETERMINISTIC), ids=lambda run: str(run))
on_kernels = pytest.mark.parametrize("run", KERNELS, ids=lambda run: str(run))


def sampled(values: Iterable[Any], step: int, first: int = 0) -> list[Any]:
    """Return all values in the long profile, otherwise every `step`-th one from the `first`."""
    every = list(values)
    return every if is_long() else every[first::step]


def on_kernels_for(
    names: str, values: Iterable[Any], on: pytest.MarkDecorator | None = None
) -> pytest.MarkDecorator:
    """Parametrize a test by runs, those of kernels by default, and by `names`, whose values are tuples if several.

    Runs with `deterministic=True` differ only in kernels of gradients: in a short run on the simulator, they have every
    fifth value.
    """
    runs = KERNELS if on is None else on.args[1]
    return _for_each_run(runs, names, values, lambda run: 5 if run.deterministic else 1)


def sampled_on_simulator(
    on: pytest.MarkDecorator, names: str, values: Iterable[Any], step: int, first: int = 0
) -> pytest.MarkDecorator:
    """Parametrize a test by the runs of `on` and by `names`.

    Short runs on the simulator use every `step`-th value from the `first`. There, float16 also replaces bfloat16: the
    kernels differ only by conversions, which other tests cover.
    """
    return _for_each_run(on.args[1], names, values, lambda run: step, _of_one_half, first)


def _of_one_half(value: Any) -> Any:
    """Return the parameters of a test with float16 instead of bfloat16."""
    return tuple("float16" if each == "bfloat16" else each for each in value) if isinstance(value, tuple) else value


def _for_each_run(
    runs: Iterable[Any], names: str, values: Iterable[Any], step_of: Callable[[Run], int],
    changed: Callable[[Any], Any] = lambda value: value, first: int = 0,
) -> pytest.MarkDecorator:  # fmt: skip
    every, parameters = [*values], []
    for each in runs:
        run, marks = (each, ()) if isinstance(each, Run) else (each.values[0], each.marks)
        is_short = run.executor == "sim" and not is_long()
        for value in map(changed, every[first :: step_of(run)]) if is_short else every:
            fixed = value if "," in names else (value,)
            words = [getattr(x, "__name__", str(x)).removeprefix("check_") for x in (*fixed, run)]
            parameters.append(pytest.param(run, *fixed, marks=marks, id="-".join(words)))
    return pytest.mark.parametrize(f"run, {names}", parameters)


def holds_for_examples(
    on: pytest.MarkDecorator = on_every_executor, **drawn: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes `test(run, example, ...)` a property, with examples that a run can afford."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def on_examples(run: Run, **fixed: Any) -> None:
            def check(example: Example) -> None:
                test(run, example, **fixed)

            # Each test has different examples, but the same ones in every run.
            check.__name__ = check.__qualname__ = "_".join([test.__name__, *(each.__name__ for each in fixed.values())])
            run.settings(given(run.examples(**drawn))(check))()

        given_names = [name for name in inspect.signature(test).parameters if name not in ("run", "example")]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in given_names]
        first = inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        on_examples.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
        on_examples.__name__, on_examples.__doc__ = test.__name__, test.__doc__
        on_examples.__qualname__, on_examples.__module__ = test.__qualname__, test.__module__
        return on(on_examples)

    return decorate
