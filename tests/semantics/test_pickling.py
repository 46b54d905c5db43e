"""Everything that the library returns can be pickled and copied after use, stays equal, and pickles no caches."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import multiprocessing
import pickle
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import numpy as np
from cached_calls import cached
import pytest
import scipy.sparse
from executors import needs_compiler
from hypothesis import find

import cuflash
from cuflash import BlockIndex, DeviceSpec, masks, patterns, study, testing
from cuflash.compiler import nvrtc as compiling
from cuflash.diagnosis import doctor
from cuflash.errors import CompileError
from cuflash.masks.base import And, Mask, Not, Or
from cuflash.blocks.work_list import requested_mask, work_list
from cuflash.testing import strategies
from cuflash.planning.spec import Entry, KernelSpec

RNG = np.random.default_rng(0)
Q, K, V, DO = RNG.standard_normal((4, 2, 40, 16), dtype=np.float32)
SHAPE = masks.MaskShape((), 2, 40, 40)
SORTED, UNSORTED = np.repeat([1, 4, 9, 11], 10), np.tile([3, 1], 20)


def is_even(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i + j) % 2 == 0


MASKS: dict[str, Callable[[], Mask]] = {
    "masks.Band": lambda: masks.Band(-3, 1),
    "masks.BlockPattern": lambda: masks.BlockPattern(np.tri(5, dtype=bool), 8),
    "masks.Causal": lambda: masks.Causal("top_left"),
    "masks.ChosenBlocks": lambda: masks.ChosenBlocks(SORTED[:, None] % 3, 16, counts=UNSORTED % 2),
    "masks.Compressed": lambda: masks.Compressed(8, 4),
    "masks.Dense": lambda: masks.Dense(np.tri(40, dtype=bool)),
    "masks.Dilated": lambda: masks.Dilated(3, 2, 0),
    "masks.Documents": lambda: masks.Documents(SORTED),
    "masks.FromFunction": lambda: masks.FromFunction(is_even),
    "masks.Lengths": lambda: masks.Lengths(q=30, kv=np.array(17)),
    "masks.Mask": lambda: masks.Causal() & ~masks.SlidingWindow(2, 2) | masks.Lengths(kv=3),
    "masks.PrefixLM": lambda: masks.PrefixLM(7),
    "masks.Sequences": lambda: masks.Sequences.of([17, 0, 23], causal=True),
    "masks.SlidingWindow": lambda: masks.SlidingWindow(4, None),
    "masks.Sparse": lambda: masks.Sparse(scipy.sparse.eye_array(40)),
    "a pattern on blocks": lambda: patterns.strided(2).on_blocks(8, mirrored=True) ^ masks.Band(0, 3),
    "patterns.bigbird": lambda: patterns.bigbird(40, block=4),
    "patterns.butterfly": lambda: patterns.butterfly(40, block=4),
    "patterns.checkerboard": lambda: patterns.checkerboard(40, block=4),
    "patterns.fixed": lambda: patterns.fixed(4, 1),
    "patterns.longformer": lambda: patterns.longformer((2, 2), 2),
    "patterns.random": lambda: patterns.random(40, block=4, density=0.3),
    "patterns.sink_local": lambda: patterns.sink_local(2, (3, 0)),
    "patterns.strided": lambda: patterns.strided(4),
    "documents in any order": lambda: masks.Documents(UNSORTED),
    "blocks in a sparse array": lambda: masks.BlockPattern(scipy.sparse.eye_array(5, format="csr"), 8),
    "a block index as a mask": lambda: index().as_mask(),
    "intersection": lambda: And((masks.Causal(), masks.Band(-2, 2))),
    "union": lambda: Or((masks.Causal(), masks.Band(2, 2))),
    "complement": lambda: Not(masks.Causal()),
}


@cache
def drawn(name: str) -> Mask:
    """Return a mask of this class of `masks`, drawn by the strategies of the tests."""
    alone = strategies.masks(SHAPE, max_leaves=1)
    return find(alone, lambda mask: type(mask) is getattr(masks, name), random=Random(0))


# Other public classes get a drawn mask.
for public in {name for name in masks.__all__ if inspect.isclass(getattr(masks, name))} - {"MaskShape"}:
    MASKS.setdefault(f"masks.{public}", lambda public=public: copy.deepcopy(drawn(public)))


def index() -> BlockIndex:
    return BlockIndex.from_mask(masks.Causal() | masks.Documents(UNSORTED), block=8, **SHAPE._asdict())


def is_hashable(mask: Mask) -> bool:
    try:
        hash(mask)
    except TypeError:  # the mask holds arrays, so it has no hash
        return False
    return True


def used_mask(make: Callable[[], Mask]) -> Mask:
    mask = make()
    mask.toarray(**SHAPE._asdict()), BlockIndex.from_mask(mask, block=8, **SHAPE._asdict()), repr(mask)
    is_hashable(mask)
    return mask


def used_index() -> BlockIndex:
    used = index()
    used.report(), used.picture(), used.transpose(), used._block_rows, used._on_host
    cuflash.attention(Q, K, V, mask=used)
    return used


def used_work(mask: Mask) -> Any:
    work = work_list(requested_mask(mask, False, None, SHAPE), SHAPE, (16, 16))
    work.row(0, 0, 0, 16), work.column(0, 0, 0, 16), work.lists, work.on_host
    getattr(work, "most_in_row", None), getattr(work, "used_rows", None), getattr(work, "used_keys", None)
    return work


def used_plan(mask: Mask | None, **options: Any) -> cuflash.Plan:
    ready = cuflash.plan(Q, K, V, mask=mask, **options)
    for _ in range(2):
        ready.backward(DO, Q, K, V, *ready.forward(Q, K, V))
    ready.compile(), ready.explain()
    return ready


def used_example() -> Any:
    example = testing.Structure(seqlen_q=5, seqlen_kv=7, mask=masks.Causal("bottom_right"), has_dlse=True).example()
    example.exact, example.bounds, example.dense_mask, example.problem, example.probable_bounds
    return example


def raised(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


SPEC = KernelSpec(
    entry=Entry(family="simt", name="forward"), dtype=np.dtype(np.float32), head_dim=64, value_dim=64, block_q=32,
    block_kv=32,
)
COMPILED = compiling.Compiled(
    spec=SPEC, architecture="sm_80", seconds=0.5, is_from_cache=False, log="", code=b"\x7fELF",
    resources=compiling.Resources(40, 0, 0, 0),
)  # fmt: skip
H100 = DeviceSpec.gpu("H100")


def used_cache() -> cuflash.KVCache:
    cache = cuflash.KVCache(
        batch=2, num_kv_heads=2, head_dim=8, capacity=40, dtype=np.float32, page_size=16, num_pages=5
    )
    cache.append(*np.ones((2, 2, 2, 20, 8), np.float32), counts=[20, 0])
    cache.fork(0, 1)
    cache.attention(np.ones((2, 2, 1, 8), np.float32))
    return cache


# Everything that a call returns, after it has been used.
def decayed(s: Any, b: Any, h: Any, i: Any, j: Any, slope: Any) -> Any:
    return s - slope[h] * abs(i - j)


OBJECTS: dict[str, Callable[[], Any]] = {
    **{name: lambda make=make: used_mask(make) for name, make in MASKS.items()},
    **{f"{name}, resolved": lambda make=make: used_mask(lambda: make().resolve(SHAPE)) for name, make in MASKS.items()},
    "masks.MaskShape": lambda: SHAPE,
    "BlockIndex": used_index,
    "Bounds": lambda: cuflash.error_bound(Q, K, V, DO),
    "CompileError": lambda: CompileError("simt_forward", "sm_90", "error: expected a ;", "text.cu"),
    "DeviceSpec": lambda: H100,
    "Dropout": lambda: cuflash.Dropout(0.1, np.array(3), 4),
    "Peaks": lambda: cuflash.study.Peaks.of(H100),
    "QuantizationBound": lambda: cuflash.study.quantization_bound(Q, K, V, *map(cuflash.quantize, (Q, K, V))),
    "Quantized": lambda: cuflash.quantize(Q, rotate=cuflash.Rotation(16, seed=3)),
    "Recall": lambda: cuflash.study.recall(Q, K, V, mask=masks.Band(0, 9)),
    "Roofline": lambda: study.roofline(cuflash.plan(*[cuflash.ShapeDtype((2, 40, 16), np.float16)] * 3, device=H100)),
    "Rotation": lambda: cuflash.Rotation(16, seed=3),
    "KVCache": used_cache,
    "Gradients": lambda: cuflash.attention_vjp(Q, K, V)[1](DO),
    "Score": lambda: cuflash.scores.Score(decayed, slope=np.arange(2.0)),
    "a composed score of the library": lambda: (
        cuflash.scores.relative_position(np.ones((2, 8)), 16, bidirectional=True) @ cuflash.scores.softcap(5.0)
    ),
    "ShapeDtype": lambda: cuflash.ShapeDtype((2, 3), "float16"),
    "UnsupportedProblem": lambda: raised(lambda: cuflash.attention(Q, K[..., :3], V, scale=float("nan"))),
    "testing.Example": used_example,
    "testing.Structure": lambda: testing.Structure(seqlen_q=5, mask=masks.Causal()),
    "index report": lambda: index().report(),
    "intervals": lambda: used_work(masks.Documents(SORTED)),
    "a band": lambda: used_work(masks.Causal()),
    "a list": lambda: used_work(masks.Documents(UNSORTED)),
    "a plan": lambda: used_plan(masks.Causal())._plan,
    "a plan for a GPU": lambda: used_for_a_gpu(None)._plan,
    "a plan of a list for a GPU": lambda: used_for_a_gpu(masks.Documents(UNSORTED))._plan,
    "compiled": lambda: COMPILED,
    "cache info": cuflash.cache_info,
    "doctor's report": doctor,
}
EXECUTABLES = {
    "cpu": {"executor": "cpu"},
    "simt": {"executor": "sim", "kernel": "simt"},
    "naive": {"executor": "sim", "kernel": "naive"},
}


def used_for_a_gpu(mask: Mask | None) -> cuflash.Plan:
    half = cuflash.ShapeDtype((2, 4096, 64), np.float16)
    shape = masks.MaskShape((), 2, 4096, 4096)
    mask = None if mask is None else BlockIndex.from_mask(masks.Dilated(3), block=128, **shape._asdict()).as_mask()
    ready = cuflash.plan(half, half, half, mask=mask, causal=True, device=H100)
    ready.explain()
    return ready


def described(value: Any) -> Any:
    """Return a value's content for comparison: arrays by their bytes, records by their fields, masks by elements."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Mask):
        return type(value), described(value.toarray(**SHAPE._asdict())) if _fits(value) else repr(value)
    if isinstance(value, Exception):
        return type(value), value.args, str(value), getattr(value, "reasons", None)
    if isinstance(value, cuflash.scores.Score):
        return str(value), value.program, value.numbers, described(dict(value.arrays))
    if isinstance(value, cuflash.KVCache):
        return type(value), repr(value), list(map(described, (value.k, value.v, value.lengths, value.block_table)))
    if dataclasses.is_dataclass(value):
        return type(value), {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return type(value), list(map(described, value))
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    return value


def _fits(mask: Mask) -> bool:
    try:
        mask.toarray(**SHAPE._asdict())
    except cuflash.UnsupportedProblem:
        return False
    return True


def passes_on(value: Any) -> list[Any]:
    protocols = range(2, pickle.HIGHEST_PROTOCOL + 1)
    return [
        copy.copy(value), copy.deepcopy(value), *(pickle.loads(pickle.dumps(value, each)) for each in protocols)
    ]  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_a_used_object_tells_the_same_after_a_pickle_and_a_copy(name: str) -> None:
    used = OBJECTS[name]()
    is_hashed = isinstance(used, Mask) and "function" not in name.lower() and is_hashable(used)
    for passed_on in passes_on(used):
        assert type(passed_on) is type(used) and described(passed_on) == described(used)
        assert not is_hashed or passed_on == used and hash(passed_on) == hash(used)


SLOPES, OFFSETS = np.arange(2, dtype=np.float32), np.array([0, 17, 40])
ALIBI = cuflash.scores.alibi(SLOPES)


def times(factor: float) -> cuflash.scores.Score:
    return cuflash.scores.Score(lambda s, b, h, i, j, t: factor * t[h] * s, t=SLOPES)


SCORES: dict[str, cuflash.scores.Score] = {
    "a function": cuflash.scores.Score(decayed, slope=SLOPES),
    "a function inside of another": times(2.0),
    "alibi": ALIBI,
    "bias": cuflash.scores.bias(np.ones((40, 40), np.float32)),
    "composed": cuflash.scores.temperature(SLOPES) @ ALIBI,
    "composed with a cap": cuflash.scores.softcap(5.0) @ ALIBI,
    "other arrays": ALIBI._with_arrays({"slopes": SLOPES + 1}),
    "relative_position": cuflash.scores.relative_position(np.ones((2, 8), np.float32), 16, bidirectional=True),
    "relative_position_2d": cuflash.scores.relative_position_2d(np.ones((2, 39, 3), np.float32), 2),
    "renamed": ALIBI.renamed({"slopes": "others"}),
    "temperature": cuflash.scores.temperature(SLOPES),
    "within": cuflash.scores.within(ALIBI, OFFSETS),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_deep_copy_of_a_score_has_arrays_of_its_own_and_a_copy_shares_them(name: str) -> None:
    score = SCORES[name]
    reals = {each: array for each, array in score.arrays.items() if array.dtype == np.float32}
    assert reals and all(copy.copy(score).arrays[each] is array for each, array in reals.items())
    copies, (again,), arrays = copy.deepcopy(({"score": score}, [score], reals))
    copied = copies["score"]
    assert copied is again and copied is not score and described(copied) == described(score)
    assert not any(np.shares_memory(copied.arrays[each], array) for each, array in score.arrays.items())
    assert all(
        copied.arrays[each] is array for each, array in arrays.items()
    )  # other holders of an array get its copy
    before = cuflash.attention(Q, K, V, score=score)
    for array in arrays.values():
        array += 3
    assert described(cuflash.attention(Q, K, V, score=score)) == described(before)
    assert described(cuflash.attention(Q, K, V, score=copied)) != described(before)


@pytest.mark.parametrize("options", EXECUTABLES.values(), ids=EXECUTABLES)
@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Documents(UNSORTED)], ids=["dense", "causal", "list"])
@needs_compiler
def test_a_used_plan_and_a_used_vjp_run_after_a_pickle_and_a_copy(mask: Mask | None, options: dict[str, Any]) -> None:
    ready = used_plan(mask, **options)
    o, lse = ready.forward(Q, K, V)
    gradients = ready.backward(DO, Q, K, V, o, lse)
    for passed_on in passes_on(ready):
        assert passed_on.explain() == ready.explain() and passed_on is not ready
        for _ in range(2):
            assert described(passed_on.forward(Q, K, V)) == described((o, lse))
            assert described(passed_on.backward(DO, Q, K, V, o, lse)) == described(gradients)
    _, vjp = cuflash.attention_vjp(Q, K, V, mask=mask, **options)
    expected = vjp(DO)
    assert all(described(passed_on(DO)) == described(expected) for passed_on in passes_on(vjp))


def test_a_copy_of_a_plan_for_another_executor_has_no_calls_of_the_first() -> None:
    ready = used_plan(None)
    other = dataclasses.replace(ready, executor="sim")
    owners = [key[1] for key in cached("forward")]
    assert [id(each._owner) in owners for each in (ready, other)] == [True, False]


FRESH: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    **{name: (lambda make=make: make().resolve(SHAPE), OBJECTS[f"{name}, resolved"]) for name, make in MASKS.items()},
    "index": (index, used_index),
    "plan": (lambda: cuflash.plan(Q, K, V, mask=index()), lambda: used_plan(index())),
    "example": (
        lambda: testing.Structure(
            seqlen_q=5, seqlen_kv=7, mask=masks.Causal("bottom_right"), has_dlse=True
        ).example(),
        used_example,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FRESH)
def test_what_use_has_left_is_not_pickled(name: str) -> None:
    fresh, used = (make() for make in FRESH[name])
    # Equal strings and numbers may be one object in only one of the two pickles, where pickle writes them once: a few
    # bytes each.
    assert abs(len(pickle.dumps(used)) - len(pickle.dumps(fresh))) <= 64


def test_every_public_class_is_in_the_table_and_every_function_is_pickled_by_name() -> None:
    places = {"": cuflash, "masks.": masks, "patterns.": patterns, "testing.": testing}
    public = {f"{place}{name}": getattr(module, name) for place, module in places.items() for name in module.__all__}
    classes = {name for name, value in public.items() if inspect.isclass(value)}
    makers = {name for name in public if name.startswith("patterns.")}
    assert {name for name in OBJECTS if name in public} | {"Plan"} == classes | makers
    for name, value in public.items():
        # Hypothesis wraps routines of `testing`
        if inspect.isclass(value) or inspect.isroutine(value) and "testing." not in name:
            assert pickle.loads(pickle.dumps(value)) is value


def _run(ready: Any) -> Any:
    return described(ready.forward(Q, K, V))


@pytest.mark.slow
def test_a_used_plan_runs_in_a_process_of_its_own() -> None:
    ready = used_plan(masks.Causal())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_run, (ready,)) == _run(ready)
