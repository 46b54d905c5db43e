"""Every argument of every public function gets values of every kind, most of them invalid.

A call succeeds, or raises one of the two errors that calls have, with a message that names the argument and its rule.
It never changes its arguments.
"""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cuflash
from cuflash import BlockIndex, DeviceSpec, ShapeDtype, UnsupportedProblem, masks, patterns, scores, study
from cuflash.compiler import nvrtc as compiling

SHAPE = (2, 10, 8)
RNG = np.random.default_rng(0)


def an_array(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape or SHAPE).astype(dtype)


class Foreign:
    """An array of a library that NumPy and CuPy do not know, which supports only DLPack."""

    def __init__(self, host: Any = None, device: Any = (1, 0), fault: BaseException | None = None) -> None:
        self.host, self.device, self.fault = an_array() if host is None else host, device, fault

    def __dlpack_device__(self) -> Any:
        if isinstance(self.device, BaseException):
            raise self.device
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        if self.fault is not None:
            raise self.fault
        return self.host.__dlpack__(**options) if isinstance(self.host, np.ndarray) else self.host


class Traced:
    """An array with a namespace but without memory, like those inside a compiled function."""

    shape, ndim, dtype, strides, size = SHAPE, 3, np.dtype(np.float32), (320, 32, 4), 160

    def __array_namespace__(self) -> Any:
        return inspect


def a_matrix() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.asmatrix(an_array(10, 8))


def a_generator() -> Iterator[int]:
    yield 1


NUMBERS: dict[str, Callable[[], Any]] = {
    repr(value) if len(repr(value)) < 30 else label: lambda value=value: value
    for label, value in enumerate(
        [
            None, True, False, np.True_, np.False_, 0, 1, -1, 3, 0.5, -0.0, float("nan"), float("inf"), np.float32(0.5),
            np.float64("nan"), np.float16(2), np.int64(3), np.uint8(3), np.longdouble(0.5), 1j, np.complex64(1),
            Decimal("0.5"), Decimal("sNaN"), Fraction(1, 2), ml_dtypes.bfloat16(1), np.timedelta64(3, "s"), "", "auto",
            "0.5", "float32", np.str_("cpu"), b"x", (), (1, 2), (1, 2, 3), ("a", None), (None, None), ((1,), 2), 1.0,
        ]
    )
}  # fmt: skip
ARRAYS: dict[str, Callable[[], Any]] = {
    "0-d float": lambda: np.array(0.5),
    "0-d bool": lambda: np.array(True),
    "0-d complex": lambda: np.array(1j),
    "0-d object": lambda: np.array(None),
    "bool [2]": lambda: np.array([True, False]),
    "bool [10, 10]": lambda: np.tri(10, dtype=bool),
    "float [10, 10]": lambda: an_array(10, 10),
    "float64": lambda: an_array(dtype=float),
    "complex": lambda: an_array(dtype=complex),
    "longdouble": lambda: an_array(dtype=np.longdouble),
    "int": lambda: an_array(dtype=int),
    "big-endian": lambda: an_array(dtype=">f4"),
    "objects": lambda: an_array().astype(object),
    "objects that are arrays": lambda: np.array([an_array(), "x", None], dtype=object),
    "records": lambda: np.zeros(SHAPE, [("x", "f4"), ("y", "i4")]),
    "dates": lambda: np.zeros(SHAPE, "M8[s]"),
    "words": lambda: np.full(SHAPE, "x"),
    "void": lambda: np.zeros(SHAPE, "V4"),
    "empty": lambda: np.zeros((0, 0), np.float32),
    "masked": lambda: np.ma.masked_invalid(an_array()),
    "matrix": a_matrix,
    "read-only": lambda: np.broadcast_to(np.float32(1), SHAPE),
    "misaligned": lambda: np.frombuffer(bytearray(8 * 20 * 4 + 1), np.float32, 160, 1).reshape(SHAPE),
    "half": lambda: an_array(dtype=np.float16),
}
FOREIGN: dict[str, Callable[[], Any]] = {
    "foreign": Foreign,
    "foreign of another shape": lambda: Foreign(an_array(3)),
    "foreign mask": lambda: Foreign(np.tri(10, dtype=bool)),
    "foreign number": lambda: Foreign(np.array(0.5)),
    "foreign that fails": lambda: Foreign(fault=BufferError("requires grad, use detach()")),
    "foreign without an attribute": lambda: Foreign(fault=AttributeError("no attribute 'data_ptr'")),
    "foreign with a bug": lambda: Foreign(fault=ZeroDivisionError("division by zero")),
    "foreign that says nothing": lambda: Foreign(fault=RuntimeError()),
    "foreign without a capsule": lambda: Foreign(host="capsule"),
    "foreign on a TPU": lambda: Foreign(device=(99, 0)),
    "foreign on no device": lambda: Foreign(device=None),
    "foreign on an empty device": lambda: Foreign(device=()),
    "foreign on a word": lambda: Foreign(device="cpu"),
    "foreign meta tensor": lambda: Foreign(device=ValueError("Unknown device type meta for Dlpack")),
    "traced": Traced,
}
OTHERS: dict[str, Callable[[], Any]] = {
    "10**400": lambda: 10**400,
    "-10**5000": lambda: -(10**5000),
    "a long word": lambda: "x" * 1000,
    "list": list,
    "list of numbers": lambda: [1, 2],
    "list of lists": lambda: [[True, False], [True, True]],
    "list of arrays": lambda: [an_array(), an_array(2, 10)],
    "tuple of arrays": lambda: (an_array(), an_array(2, 10), an_array()),
    "the same array twice": lambda: (lambda x: (x, x))(an_array()),
    "dict": lambda: {"q": 1},
    "set": lambda: {1, 2},
    "range": lambda: range(3),
    "object": object,
    "function": lambda: a_generator,
    "generator": a_generator,
    "bytearray": lambda: bytearray(8),
    "memoryview": lambda: memoryview(an_array()),
    "module": lambda: np,
    "the class ndarray": lambda: np.ndarray,
    "the class float32": lambda: np.float32,
    "the class Causal": lambda: masks.Causal,
    "the class DeviceSpec": lambda: DeviceSpec,
    "dtype": lambda: np.dtype(np.float16),
    "csr": lambda: scipy.sparse.eye_array(10, format="csr"),
    "bsr": lambda: scipy.sparse.eye_array(10, format="bsr"),
    "coo of one axis": lambda: scipy.sparse.coo_array(np.ones(3)),
    "csr matrix": lambda: scipy.sparse.csr_matrix(np.eye(10)),
    "ShapeDtype": lambda: ShapeDtype(SHAPE, np.float32),
    "ShapeDtype of another shape": lambda: ShapeDtype((3, 4, 5), "f4"),
    "mask": lambda: masks.SlidingWindow(2, 0),
    "mask of another length": lambda: masks.Documents(np.zeros(7, int)),
    "index": lambda: BlockIndex.from_blocks(np.eye(5, dtype=bool), 10, 10, 2),
    "index of another length": lambda: BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, 2),
    "host": DeviceSpec.host,
    "H100": lambda: DeviceSpec.gpu("H100"),
    "MaskShape": lambda: masks.MaskShape((), 2, 10, 10),
    # _make checks nothing, unlike the constructor
    "MaskShape of rubbish": lambda: masks.MaskShape._make(("x", None, -1, 2.5)),
    "Gradients": lambda: cuflash.Gradients(1, 2, 3),
}
JUNK = {**NUMBERS, **ARRAYS, **FOREIGN, **OTHERS}

GOOD: dict[str, Any] = {
    "q": an_array(), "k": an_array(), "v": an_array(), "do": an_array(), "dlse": an_array(2, 10), "mask": None,
    "causal": False, "window": None, "scale": 0.5, "kernel": "auto", "executor": "auto", "precision": "ieee",
    "deterministic": False, "sink": an_array(2), "wrt": "sink", "return_lse": False, "device": None, "out": None,
    "dropout": cuflash.Dropout(0.5, seed=3),
    "product_dtype": None, "probable": False,
}  # fmt: skip
O, LSE = cuflash.attention(GOOD["q"], GOOD["k"], GOOD["v"], return_lse=True)
READY = cuflash.plan(GOOD["q"], GOOD["k"], GOOD["v"])
VJP = cuflash.attention_vjp(GOOD["q"], GOOD["k"], GOOD["v"])[1]
WITH_SINK = cuflash.plan(GOOD["q"], GOOD["k"], GOOD["v"], sink=GOOD["sink"], wrt="sink")
SIM = cuflash.plan(GOOD["q"], GOOD["k"], GOOD["v"], executor="sim")
H100 = DeviceSpec.gpu("H100")
INDEX = BlockIndex.from_blocks
LENGTHS = {"seqlen_q": 10, "seqlen_kv": 10, "block": 2}


def planned_elsewhere(**arguments: Any) -> Any:
    return cuflash.plan(**{"device": H100, **arguments})


def precompile(**arguments: Any) -> Any:
    """Call precompile without the compiler, which takes seconds."""
    shapes = {name: ShapeDtype(SHAPE, np.float32) for name in "qkv" if arguments[name] is GOOD[name]}
    with mock.patch.object(compiling, "precompile", lambda specs, target: tuple(specs)):
        return cuflash.precompile(**{**arguments, **shapes})


# Texts with which a message may name an argument, in every call or in one call.
NAMES = {"mask": "mask|q_ids|block index", "outs": "outs|lses", "lses": "outs|lses"} | dict.fromkeys(
    ("seqlen_q", "seqlen_kv", "block", "shape", "matrix"), r"seqlen_\w+|block|shape|matrix"
)
NAMES |= {"KVCache.attention q": "q|k's", "k_pages": "k_pages|dtype", "v_pages": "v_pages|dtype"}


def given_to(call: Callable[..., Any], *names: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    return call, {name: {**GOOD, "o": O, "lse": LSE}[name] for name in names}


SIZES = {"batch": 3, "num_kv_heads": 2, "head_dim": 8, "capacity": 70, "dtype": np.float32}
PAGES = {"page_size": 16, "num_pages": 15}
ROWS = np.ones((3, 2, 2, 8), np.float32)
OFFSETS = np.array([0, 4, 10])
OF_MODELS = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "dtype": np.float16, "page_size": 16, "value_dim": 8}


def of_a_cache(method: str, **arguments: Any) -> Any:
    """Call a method of a cache that holds two rows of each sequence, with pages for some methods."""
    cache = cuflash.KVCache(**SIZES, **(PAGES if method in ("append", "attention") else {}))
    cache.append(ROWS, ROWS)
    return getattr(cache, method)(**arguments)


OPTIONS = ("mask", "causal", "window", "scale", "kernel", "executor", "precision", "deterministic")
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": given_to(cuflash.attention, "q", "k", "v", *OPTIONS, "sink", "dropout", "out", "return_lse"),
    "attention_vjp": given_to(cuflash.attention_vjp, "q", "k", "v", *OPTIONS, "sink", "out", "return_lse"),
    "wrt": given_to(lambda wrt: cuflash.attention_vjp(O, O, O, sink=GOOD["sink"], wrt=wrt), "wrt"),
    "vjp": given_to(VJP, "do", "dlse"),
    "plan": given_to(cuflash.plan, "q", "k", "v", *OPTIONS, "sink", "dropout", "device"),
    "Dropout": (cuflash.Dropout, {"p": 0.1, "seed": 3, "offset": 4}),
    "keep": (cuflash.Dropout(0.1, seed=3).keep, {"shape": (2, 3, 4), "queries": np.arange(2), "keys": None}),
    "plan for a GPU": given_to(planned_elsewhere, "q", "k", "v", *OPTIONS, "sink"),
    "forward with a sink": (lambda sink: WITH_SINK.forward(O, O, O, sink=sink), {"sink": GOOD["sink"]}),
    "backward with a sink": (lambda sink: WITH_SINK.backward(O, O, O, O, O, LSE, sink=sink), {"sink": GOOD["sink"]}),
    "Plan.forward": given_to(READY.forward, "q", "k", "v", "out"),
    "Plan.backward": given_to(READY.backward, "do", "q", "k", "v", "o", "lse", "dlse"),
    "forward on the simulator": given_to(SIM.forward, "q", "k", "v", "out"),
    "precompile": (
        precompile,
        given_to(precompile, "q", "k", "v", *OPTIONS[:5], "precision", "deterministic")[1] | {"device": H100},
    ),
    "recall": (study.recall, {**given_to(study.recall, "q", "k", "v", "causal", "scale")[1], "mask": masks.Band()}),
    "merge": (cuflash.merge, {"outs": [O, O], "lses": [LSE, LSE]}),
    "error_bound": given_to(
        cuflash.error_bound, "q", "k", "v", "do", "dlse", *OPTIONS[:4], "sink", "precision", "product_dtype", "probable"
    ),
    "error_bound of a plan": (partial(cuflash.error_bound, O, O, O), {"plan": READY, "mask": None, "sink": None}),
    "BlockIndex.from_mask": (
        BlockIndex.from_mask,
        {"mask": masks.Causal(), **LENGTHS, "batch": (2,), "num_heads": 3},
    ),
    "BlockIndex.from_blocks": (BlockIndex.from_blocks, {"blocks": np.eye(5, dtype=bool), **LENGTHS}),
    "BlockIndex.from_scipy": (BlockIndex.from_scipy, {"matrix": scipy.sparse.eye_array(5), **LENGTHS}),
    "BlockIndex.from_scipy of elements": (
        BlockIndex.from_scipy, {"matrix": scipy.sparse.bsr_array(np.eye(10)), "seqlen_q": 10, "seqlen_kv": 10}
    ),
    "DeviceSpec": (
        DeviceSpec,
        dict(name="x", compute_capability=None, num_processors=1, tile_memory_bytes=1 << 20, cache_bytes=0),
    ),
    "DeviceSpec.gpu": (DeviceSpec.gpu, {"name": "H100"}),
    "ShapeDtype": (ShapeDtype, {"shape": (2, 3), "dtype": np.float32}),
    "butterfly": (patterns.butterfly, {**LENGTHS, "max_stride": 2}),
    "bigbird": (
        patterns.bigbird,
        {
            **LENGTHS, "num_window_blocks": 1, "num_global_blocks": 1, "num_random_blocks": 1, "num_heads": 1, "seed": 0
        },
    ),
    "random": (patterns.random, {**LENGTHS, "density": 0.5, "num_heads": 1, "seed": 0, "diagonal": True}),
    "longformer": (patterns.longformer, {"window": (2, 2), "num_global": 1, "dilation": 2, "align": None}),
    "strided": (patterns.strided, {"stride": 2, "align": None}),
    "fixed": (patterns.fixed, {"stride": 3, "num_summary": 1, "align": None}),
    "sink_local": (patterns.sink_local, {"num_sink_tokens": 1, "window": (2, 0), "align": None}),
    "Causal": (masks.Causal, {"align": None}),
    "toarray": (masks.Causal("top_left").toarray, {"seqlen_q": 10, "seqlen_kv": 9, "batch": (2,), "num_heads": 3}),
    "on_blocks": (masks.Causal("top_left").on_blocks, {"block": 2, "mirrored": False}),
    "FromFunction": (masks.FromFunction, {"function": np.less_equal}),
    "Sparse": (masks.Sparse, {"matrix": scipy.sparse.eye_array(10)}),
    "checkerboard": (patterns.checkerboard, LENGTHS),
    "Sequences": (
        masks.Sequences,
        {
            "q_offsets": OFFSETS, "kv_offsets": OFFSETS, "causal": "top_left", "window": (1, 0), "allow_gaps": False
        },
    ),
    "pack": (cuflash.pack, {"arrays": [O], "axis": -2}),
    "unpack": (cuflash.unpack, {"packed": O, "offsets": OFFSETS, "axis": -2, "allow_gaps": True}),
    "kv_cache_bytes": (cuflash.study.kv_cache_bytes, OF_MODELS | {"tokens": 3}),
    "largest_length": (cuflash.study.largest_length, OF_MODELS | {"available_bytes": 1e9, "batch": 2}),
    "memory": (cuflash.study.memory, {"plan": cuflash.plan(*[ShapeDtype((4, 2), "f4")] * 3, device=H100)}),
    "KVCache": (cuflash.KVCache, SIZES | PAGES | {"value_dim": 8, "xp": np}),
    "KVCache.append": (partial(of_a_cache, "append"), {"k": ROWS, "v": ROWS, "counts": [1, 2, 0]}),
    "KVCache.attention": (
        partial(of_a_cache, "attention"),
        {
            "q": ROWS, "counts": [1, 2, 0], "causal": True, "window": (1, 0), "scale": 1.0, "out": None,
            "return_lse": True, "sink": GOOD["sink"], "kernel": "auto", "executor": "auto", "precision": "ieee",
        },
    ),
    "KVCache.truncate": (partial(of_a_cache, "truncate"), {"lengths": [1, 0, 1]}),
    "KVCache.reserve": (partial(of_a_cache, "reserve"), {"lengths": [1, 0, 9]}),
    "KVCache.reset": (partial(of_a_cache, "reset"), {"rows": [1]}),
    "KVCache.rows": (partial(of_a_cache, "rows"), {"sequence": 1}),
    "KVCache.fork": (partial(of_a_cache, "fork"), {"source": 0, "target": 1}),
    "KVCache.over": (
        cuflash.KVCache.over,
        {
            "k_pages": an_array(3, 2, 16, 8), "v_pages": an_array(3, 2, 16, 8),
            "block_table": np.array([[0, 1], [2, -1]]), "lengths": [3, 4],
        },
    ),
}  # fmt: skip
PLACES = [(name, argument) for name, (_, arguments) in CALLS.items() for argument in arguments]


def bytes_of(value: Any) -> Any:
    """Copy the arrays that a value holds, to detect changes by a call."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.tobytes()
    if isinstance(value, Foreign):
        return bytes_of(value.host)
    return [bytes_of(each) for each in value] if isinstance(value, (list, tuple)) else None


def complaint(name: str, argument: str, junk: Any) -> str | None:
    """Return what is wrong with the result or the error of a call with this value, or None."""
    call, good = CALLS[name]
    arguments = {**good, argument: junk}
    before = bytes_of(list(arguments.values()))
    try:
        call(**arguments)
        if argument == "out":
            return None  # calls write to this argument
        error = None
    except (TypeError, UnsupportedProblem) as caught:
        error = caught
    except RuntimeError as caught:
        if "CuPy is missing" in str(caught):
            return None
        return f"{type(caught).__name__}: {caught}"
    except Exception as caught:
        return f"{type(caught).__name__}: {str(caught)[:300]}"
    if bytes_of(list(arguments.values())) != before:
        return "changes what was handed in"
    if error is None:
        return None
    for reason in getattr(error, "reasons", (str(error),)):
        if not re.search(r"\bmust\b|\bneeds\b|\btakes?\b|\bis for\b|\beither\b", reason) or len(reason) > 600:
            return f"no rule: {reason}"
    names = NAMES.get(f"{name} {argument}", NAMES.get(argument, argument))
    is_named = re.search(rf"\b({names})\b", str(error)) is not None
    if not is_named or type(error) not in (TypeError, UnsupportedProblem):
        return f"{argument} is not named: {error}"
    return None


@pytest.mark.parametrize(("name", "argument"), PLACES, ids=map(" ".join, PLACES))
def test_every_argument_takes_or_refuses_what_it_is_given(name: str, argument: str) -> None:
    complaints = {label: complaint(name, argument, make()) for label, make in JUNK.items()}
    assert {label: message for label, message in complaints.items() if message} == {}


BLOCKS = INDEX(np.eye(5, dtype=bool), **LENGTHS)
DOCUMENTED = {
    **{name: call for name, call in CALLS.items() if inspect.getmodule(call[0]).__name__.startswith("cuflash")},
    "vjp": (VJP.__call__, {"do": O, "dlse": None}),
    "FromFunction": (masks.FromFunction, {"function": lambda b, h, i, j: i >= j}),
    "Band": (masks.Band, {"lower": 0, "upper": 1}),
    "SlidingWindow": (masks.SlidingWindow, {"left": 0, "right": 1, "align": None}),
    "Dilated": (masks.Dilated, {"dilation": 2, "left": 0, "right": 1, "align": None}),
    "PrefixLM": (masks.PrefixLM, {"prefix": 3, "align": None}),
    "Lengths": (masks.Lengths, {"q": 3, "kv": np.arange(3)}),
    "Documents": (masks.Documents, {"q_ids": np.arange(3), "kv_ids": np.arange(3)}),
    "Sequences.of": (
        masks.Sequences.of,
        {"q_lengths": [3], "kv_lengths": [4], "causal": False, "window": None, "allow_gaps": False},
    ),
    "Dense": (masks.Dense, {"allowed": np.eye(3, dtype=bool)}),
    "BlockPattern": (masks.BlockPattern, {"blocks": np.eye(3, dtype=bool), "block": 2}),
    "BlockIndex.to_scipy": (BLOCKS.to_scipy, {"b": 0, "h": 0, "elements": True}),
    "BlockIndex.picture": (BLOCKS.picture, {"b": 0, "h": 0, "width": 5}),
    "softcap": (scores.softcap, {"cap": 3.0, "fast": False}),
    "alibi": (scores.alibi, {"slopes": np.ones(2), "align": "bottom_right"}),
    "alibi_slopes": (scores.alibi_slopes, {"num_heads": 2}),
    "bias": (scores.bias, {"array": np.ones((2, 2))}),
    "temperature": (scores.temperature, {"per_head": np.ones(2)}),
    "relative_position": (
        scores.relative_position, {"table": np.ones((2, 8)), "max_distance": 9, "bidirectional": True, "align": None}
    ),
    "relative_position_2d": (scores.relative_position_2d, {"table": np.ones((2, 3, 5)), "width": 3}),
    "within": (
        scores.within,
        {
            "score": scores.softcap(2.0), "q_offsets": [0, 3], "kv_offsets": [0, 4], "seqlen_q": 3, "seqlen_kv": 4,
            "allow_gaps": False, "align": "top_left",
        },
    ),
}  # fmt: skip


def documented_errors(call: Callable[..., Any]) -> str:
    """Return the section of a docstring that documents the errors of a call."""
    section = re.search(
        r"^Raises\n-+\n(.*?)(?=^\S[^\n]*\n---|\Z)", inspect.getdoc(call) or "", re.DOTALL | re.MULTILINE
    )
    return section[1] if section else ""


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_a_call_raises_is_in_its_docstring(name: str) -> None:
    call, good = DOCUMENTED[name]
    call(**good)
    documented, raised = documented_errors(call), set()
    for argument, make in itertools.product(good, JUNK.values()):
        try:
            call(**{**good, argument: make()})
        except (TypeError, UnsupportedProblem) as error:
            raised.add(type(error).__name__)
        except RuntimeError as error:
            assert "CuPy is missing" in str(error)
    assert raised <= set(re.findall(r"\w+", documented)), f"{name} raises {raised}; told is {documented!r}"
    assert raised


SMALL = st.integers(-3, 40)
DRAWN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), SMALL, st.floats(allow_subnormal=False), st.complex_numbers(), st.text(max_size=3),
        st.binary(max_size=3), st.decimals(), st.fractions(), st.sampled_from([10**30, -(10**30), 2**63, 10**400]),
        SMALL.map(np.int16), st.floats(width=32).map(np.float32),
        hnp.arrays(
            st.one_of(hnp.scalar_dtypes(), hnp.array_dtypes(max_size=2)),
            st.one_of(hnp.array_shapes(min_dims=0, max_dims=4, max_side=3), st.just(SHAPE), st.just((10, 10))),
        ),
    ),
    lambda inner: st.one_of(st.tuples(inner, inner), st.lists(inner, max_size=3), st.tuples(inner)),
    max_leaves=4,
)  # fmt: skip


@given(st.sampled_from(PLACES), DRAWN)
def test_every_argument_takes_or_refuses_what_is_drawn(place: tuple[str, str], junk: Any) -> None:
    assert complaint(*place, junk) is None
