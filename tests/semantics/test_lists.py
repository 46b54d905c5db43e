"""Calls accept nested lists and tuples of numbers wherever they document an array, like NumPy's functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from cupy_machine import installed

import cuflash
from cuflash import BlockIndex, masks, reference, scores, selectors
from cuflash.scores import Score
from cuflash.arrays import of_list
from cuflash.plans.conversion import as_arrays, as_mask_of_arrays

RNG = np.random.default_rng(0)
Q, K, V, DO = RNG.standard_normal((4, 2, 3, 4))
LSE = RNG.standard_normal((2, 3))
BIAS, SINK, MASK = RNG.standard_normal((2, 3, 3)), RNG.standard_normal(2), RNG.random((3, 3)) > 0.4
BLOCKS = np.array([[True, False], [True, True]])
BUDGET = selectors.Budget(top_k=1)

To = Callable[[Any], Any]  # returns an array unchanged, as a list, or as a tuple


def vjp(to: To) -> Any:
    _, pull = cuflash.attention_vjp(to(Q), to(K), to(V), bias=to(BIAS), sink=to(SINK), wrt=["bias", "sink"])
    gradients = pull(to(DO), to(LSE))
    return [*gradients, gradients["bias"], gradients["sink"]]


def plan(to: To) -> Any:
    ready = cuflash.plan(to(Q), to(K), to(V), bias=to(BIAS), score=Score(lambda s, b, h, i, j, t: s + t[h], t=to(SINK)))
    o, lse = ready.forward(to(Q), to(K), to(V), bias=to(2 * BIAS), t=to(2 * SINK))
    return o, lse, *ready.backward(to(DO), to(Q), to(K), to(V), to(o), to(lse), to(LSE), bias=to(BIAS))


def cache(to: To) -> Any:
    kv_cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=16, dtype=np.float64)
    kv_cache.append(to(K[:, None]), to(V[:, None]), counts=to(np.array([3, 2])))
    kv_cache.truncate(to(np.array([2, 2])))
    o = kv_cache.attention(
        to(Q[:, None, :1]), bias=to(np.ones((16, 1))), sink=to(SINK[:1]), counts=to(np.array([1, 0]))
    )
    chosen = selectors.quest(to(Q[:, None, :1]), kv_cache, budget=BUDGET)
    kv_cache.reset(to(np.array([1])))
    return o, kv_cache.lengths, chosen.blocks


def pages(to: To) -> Any:
    kv = np.arange(256.0).reshape(4, 1, 16, 4)
    kv_cache = cuflash.KVCache.over(to(kv), to(kv + 1), to(np.array([[0, 1], [2, 3]])), to(np.array([3, 20])))
    return kv_cache.attention(to(Q[:, None, :1]))


def bounds(to: To) -> Any:
    limits = cuflash.error_bound(
        to(Q), to(K), to(V), to(DO), dlse=to(LSE), mask=to(MASK), bias=to(BIAS), sink=to(SINK), wrt=["bias"]
    )
    return limits.o, limits.dq, limits.dsink, limits.others["bias"]


def index(block_index: BlockIndex) -> np.ndarray:
    return block_index.toarray()


def mask(attended: Any) -> np.ndarray:
    return attended.toarray(3, 3, batch=(2,), num_heads=2)


def ints(*values: Any) -> np.ndarray:
    return np.array(values)


CALLS: dict[str, Callable[[To], Any]] = {
    "attention": lambda to: cuflash.attention(to(Q), to(K), to(V), mask=to(MASK), bias=to(BIAS), sink=to(SINK)),
    "two dimensions": lambda to: cuflash.attention(to(Q[0]), to(K[0]), to(V[0])),
    "attention_vjp": vjp,
    "plan": plan,
    "KVCache": cache,
    "pages": pages,
    "error_bound": bounds,
    "recall": lambda to: cuflash.study.recall(to(Q), to(K), to(V), mask=to(MASK)).mass,
    "block_mass": lambda to: cuflash.study.block_mass(to(Q), to(K), block=2, mask=to(MASK), lse=to(LSE)),
    "merge": lambda to: cuflash.merge([to(Q), to(K)], [to(LSE), to(2 * LSE)]),
    "merge of one list": lambda to: cuflash.merge(to(np.stack([Q, K])), to(np.stack([LSE, LSE]))),
    "pack": lambda to: cuflash.pack([to(Q), to(K[:, :1])]),
    "unpack": lambda to: cuflash.unpack(to(Q), to(ints(0, 1, 3))),
    "quantization_bound": lambda to: cuflash.study.quantization_bound(
        to(Q), to(K), to(V), *(cuflash.quantize(x.astype(np.float32)) for x in (Q, K, V))
    ).o,
    "Rotation": lambda to: cuflash.Rotation(4).undo(cuflash.Rotation(4).apply(to(Q))),
    "reference": lambda to: reference.attention(to(Q), to(K), to(V), to(MASK), sink=to(SINK), weight_factors=to(BIAS)),
    "reference's gradients": lambda to: reference.attention_vjp(
        to(Q), to(K), to(V), to(DO), to(LSE), to(MASK), sink=to(SINK), weight_factors=to(BIAS)
    ),
    "alibi": lambda to: cuflash.attention(Q, K, V, score=scores.alibi(to(SINK))),
    "temperature": lambda to: cuflash.attention(Q, K, V, score=scores.temperature(to(SINK))),
    "scores.bias": lambda to: cuflash.attention(Q, K, V, score=scores.bias(to(BIAS))),
    "relative_position": lambda to: cuflash.attention(
        Q, K, V, score=scores.relative_position(to(BIAS[:, 0, [0, 1, 2, 0]]), bidirectional=True)
    ),
    "within": lambda to: cuflash.attention(Q, K, V, score=scores.within(scores.alibi(SINK), to(ints(0, 1, 3)))),
    "with_arrays": lambda to: scores.alibi(SINK)._with_arrays({"slopes": to(2 * SINK)})(0.0, 0, 1, 2, 0),
    "Lengths": lambda to: mask(masks.Lengths(kv=to(ints(2, 1)), q=to(ints(1, 3)))),
    "Documents": lambda to: mask(masks.Documents(to(ints(0, 0, 1)), to(ints([0, 1, 1], [0, 0, 1])))),
    "PrefixLM": lambda to: mask(masks.PrefixLM(to(ints(2, 1)))),
    "Sequences": lambda to: mask(masks.Sequences(to(ints([0, 1, 3], [0, 2, 3])))),
    "Sequences.of": lambda to: mask(masks.Sequences.of(to(ints([1, 2], [2, 1])))),
    "Dense": lambda to: mask(masks.Dense(to(MASK))),
    "& of a mask": lambda to: (mask(masks.Causal() & to(MASK)), mask(to(MASK) & masks.Causal())),
    "BlockPattern": lambda to: mask(masks.BlockPattern(to(BLOCKS), 2)),
    "from_blocks": lambda to: index(BlockIndex.from_blocks(to(BLOCKS), 4, 4, 2)),
    "from_mask": lambda to: index(BlockIndex.from_mask(to(MASK), 3, 3, 2)),
    "local": lambda to: index(selectors.local(to(Q), to(K), budget=BUDGET, block=2)),
    "oracle": lambda to: index(selectors.oracle(to(Q), to(K), budget=BUDGET, block=2, mask=to(MASK))),
    "pooled": lambda to: index(selectors.pooled(to(Q), to(K), budget=BUDGET, block=2)),
    "quest": lambda to: selectors.quest(to(Q), to(K), budget=BUDGET).blocks,
    "page_bounds": lambda to: selectors.page_bounds(to(Q), to(K)),
}


def parts(result: Any) -> list[np.ndarray]:
    return [np.asarray(part) for part in (result if isinstance(result, (tuple, list)) else [result])]


def as_tuple(array: np.ndarray) -> Any:
    return tuple(map(as_tuple, array)) if array.ndim > 1 else tuple(array.tolist())


@pytest.mark.parametrize("to", [np.ndarray.tolist, as_tuple, list], ids=["lists", "tuples", "a list of arrays"])
@pytest.mark.parametrize("name", CALLS)
def test_a_list_is_the_array_that_numpy_makes_of_it(name: str, to: To) -> None:
    results, expected = parts(CALLS[name](to)), parts(CALLS[name](lambda array: array))
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in expected]
    for first, second in zip(results, expected, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_a_list_has_the_dtype_of_the_arrays_that_it_stands_beside(dtype: Any) -> None:
    q, k, v, do = (x.astype(dtype) for x in (Q, K, V, DO))
    o, pull = cuflash.attention_vjp(q, k.tolist(), tuple(v.tolist()))
    o_of_arrays, pull_of_arrays = cuflash.attention_vjp(q, k, v)
    np.testing.assert_array_equal(o, o_of_arrays)
    for first, second in zip(pull(do.tolist()), pull_of_arrays(do)):
        assert first.dtype == dtype
        np.testing.assert_array_equal(first, second)
    ready = cuflash.plan(q, k, v, score=scores.alibi(SINK.astype(np.float32)))
    slopes = SINK.astype(np.float32)[::-1]
    for actual, expected in zip(
        ready.forward(q.tolist(), k, v, slopes=slopes.tolist()), ready.forward(q, k, v, slopes=slopes)
    ):
        np.testing.assert_array_equal(actual, expected)
    assert cuflash.error_bound(q.tolist(), k, v, plan=cuflash.plan(q, k, v)).o.shape == o.shape
    filled = cuflash.KVCache(batch=1, num_kv_heads=2, head_dim=4, capacity=16, dtype=dtype)
    filled.append(k[None].tolist(), v[None].tolist())
    np.testing.assert_array_equal(filled.attention(q[None].tolist(), causal=False)[0], o)


def test_ints_in_a_list_are_numbers() -> None:
    """An int array is refused as q or as a bias, but a list of ints is accepted, since a list has no dtype."""
    eye, zero = [[1, 0], [0, 1]], np.zeros((2, 2))
    expected = cuflash.attention(np.eye(2), np.eye(2), np.eye(2), bias=zero - 1, sink=zero[0, :1])
    np.testing.assert_array_equal(cuflash.attention(eye, eye, eye, bias=[[-1, -1]] * 2, sink=[0]), expected)
    assert scores.alibi([1, 2]).arrays["slopes"].dtype == np.float64
    assert Score(lambda s, b, h, i, j, t: s + t[h], t=[1, 2]).arrays["t"].dtype == np.int64
    assert cuflash.quantize(eye).source_dtype == np.float32


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: masks.Lengths(kv=[]).kv, (0,)), (lambda: masks.Documents([[]]).q_ids, (1, 0)),
        (lambda: masks.Sequences.of([]).q_offsets, (1,)),
    ],
)  # fmt: skip
def test_an_empty_list_holds_no_ints(make: Callable[[], np.ndarray], shape: tuple[int, ...]) -> None:
    assert (make().shape, make().dtype) == (shape, np.int64)


RAGGED = [Q, K[:, :1]]
OBJECTS = np.empty(2, object)
OBJECTS[:] = RAGGED
PACK = r"must be one array; got a list of sequences of unequal lengths: use packed, offsets = cuflash.pack\({}\), and"
LISTS = "must be one array; got lists of unequal lengths: give all lists at one depth the same length"
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "q of sequences": (lambda: cuflash.attention(RAGGED, K, V), cuflash.UnsupportedProblem, "q " + PACK.format("q")),
    "q of objects": (lambda: cuflash.attention(OBJECTS, K, V), cuflash.UnsupportedProblem, "q " + PACK.format("q")),
    "k of a plan": (lambda: cuflash.plan(Q, OBJECTS, V), cuflash.UnsupportedProblem, "k " + PACK.format("k")),
    "q of rows": (lambda: cuflash.attention([[1, 2], [3]], K, V), cuflash.UnsupportedProblem, "q " + LISTS),
    "a bias": (lambda: cuflash.attention(Q, K, V, bias=[[1], [2, 3]]), cuflash.UnsupportedProblem, "bias " + LISTS),
    "a mask": (lambda: cuflash.attention(Q, K, V, mask=[[True], []]), cuflash.UnsupportedProblem, "mask " + LISTS),
    "ids": (lambda: masks.Documents([[0], [0, 1]]), cuflash.UnsupportedProblem, "q_ids " + LISTS),
    "strings": (lambda: cuflash.attention([["a"]], K, V), TypeError, r"q must be an array; got \[\['a'\]\]: a list"),
    "None": (lambda: masks.Lengths(kv=[None]), cuflash.UnsupportedProblem, r"kv must be an int .*; got \[None\]"),
    "objects": (lambda: cuflash.attention(Q, K, V, sink=[{}, 1]), TypeError, r"sink must be .*; got \[dict, 1\]"),
    "a library's": (
        lambda: cuflash.attention([SimpleNamespace(__dlpack_device__=0)], K, V), TypeError,
        r"q must be an array; got \[SimpleNamespace\]: stack them into one array first",
    ),
    "a flag among ints": (lambda: masks.Lengths(kv=[1, True]), cuflash.UnsupportedProblem, r"kv must .*\[1, True\]"),
    "flags among numbers": (lambda: cuflash.attention([[1.0], [np.True_]], K, V), TypeError, "or only booleans"),
    "an empty q": (lambda: cuflash.attention([], K, V), cuflash.UnsupportedProblem, r"q must have shape .*got \(0,\)"),
    "an empty mask": (lambda: cuflash.attention(Q, K, V, mask=[]), cuflash.UnsupportedProblem, r"mask must .*\(0,\)"),
    "0 and 1": (lambda: masks.Dense([[0, 1]]), cuflash.UnsupportedProblem, r"booleans with np.array\(mask\) != 0"),
    "blocks of 0 and 1": (
        lambda: BlockIndex.from_blocks([[0, 1]], 2, 4, 2), cuflash.UnsupportedProblem,
        r"blocks must be a boolean array .*: convert 0/1 numbers to booleans with np.array\(blocks\) != 0",
    ),
    "floats as lengths": (lambda: masks.Lengths(kv=[1.5]), cuflash.UnsupportedProblem, "kv must be an int .*float64"),
    "a shape": (
        lambda: cuflash.plan((8, 64, 16), Q, Q), TypeError,
        r"q must be an array; got \(8, 64, 16\): plan accepts cuflash.ShapeDtype\(\(8, 64, 16\), dtype\)",
    ),
    "out": (lambda: cuflash.attention(Q, K, V, out=[[1.0]]), cuflash.UnsupportedProblem, "out must be a NumPy array"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_lists_are_refused_in_words(name: str) -> None:
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()


def test_named_tuples_are_no_lists() -> None:
    """Named tuples have other meanings, such as the layout of a tensor."""
    pair = NamedTuple("Pair", [("shape", Any), ("dtype", Any)])((2, 3), np.dtype(np.float32))
    assert as_arrays({"q": pair})["q"] is pair and of_list("q", pair) is pair


def test_a_list_beside_arrays_on_a_device_lies_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with installed(monkeypatch, tmp_path) as cupy:
        q = cupy.asarray(Q.astype(np.float32))
        argument = as_arrays({"q": q, "k": K.tolist(), "v": V.tolist(), "sink": SINK.tolist()})
        assert [type(array) for array in argument.values()] == [cupy.ndarray] * 4
        assert [array.dtype for array in argument.values()] == [np.float32] * 3 + [np.float64]
        assert type(as_mask_of_arrays(MASK.tolist(), "gpu", q)) is cupy.ndarray
        assert type(as_mask_of_arrays(MASK.tolist(), "gpu", cuflash.ShapeDtype((2, 3, 4), np.float32))) is np.ndarray
        o = cuflash.attention(q, K.tolist(), V.tolist(), bias=BIAS.tolist(), sink=SINK.tolist(), mask=MASK.tolist())
        operands = {"bias": cupy.asarray(BIAS), "sink": cupy.asarray(SINK), "mask": cupy.asarray(MASK)}
        k, v = (cupy.asarray(x.astype(np.float32)) for x in (K, V))
        np.testing.assert_array_equal(o.get(), cuflash.attention(q, k, v, **operands).get())
