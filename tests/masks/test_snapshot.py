"""Repeated calls with a mask of NumPy arrays or functions are cached, and edits of the mask are detected."""

from __future__ import annotations

import sys
import weakref
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
from cached_calls import cached
from cuflash.calls._call import Call
from cuflash import masks
from cuflash.masks._snapshot import Snapshot
from cuflash.testing import Example, assert_within_bounds
from hypothesis import given
from hypothesis import strategies as st

import cuflash

RNG = np.random.default_rng(0)
LENGTH = 48
Q, K, V = RNG.standard_normal((3, 2, LENGTH, 8), dtype=np.float32)
WIDTH = 9  # a global that `near` reads
DTYPES = [np.dtype(kind) for kind in ("bool", "int8", "int16", "int64", "uint64", "float32")]


def near(b, h, i, j):
    return abs(i - j) < WIDTH


def of_closure(array):
    return lambda b, h, i, j: array[i // 16, j // 16]


def kept_blocks():
    return RNG.random((3, 3)) < 0.5


MASKS = {
    "array": lambda: RNG.random((LENGTH, LENGTH)) < 0.5,
    "blocks": lambda: masks.BlockPattern(kept_blocks(), 16),
    "sparse blocks": lambda: masks.BlockPattern(scipy.sparse.coo_array(kept_blocks()), 16),
    "sparse elements": lambda: scipy.sparse.csr_array(RNG.random((LENGTH, LENGTH)) < 0.5),
    "documents": lambda: masks.Documents(np.sort(RNG.integers(0, 5, LENGTH))) & masks.Causal(),
    "function": lambda: of_closure(kept_blocks()),
    "mask of a function": lambda: masks.FromFunction(near) | masks.Causal(),
}


def arrays_in(mask):
    """Return the arrays from which a mask of `MASKS` was created."""
    if isinstance(mask, np.ndarray):
        return [mask]
    if callable(mask) and not isinstance(mask, masks.Mask):
        return [cell.cell_contents for cell in mask.__closure__]
    if isinstance(mask, masks.BlockPattern):
        return arrays_in(mask.blocks)
    return [mask.data] if scipy.sparse.issparse(mask) else []


@pytest.mark.parametrize("name", MASKS)
def test_a_call_with_the_same_mask_plans_nothing(monkeypatch, name):
    mask = MASKS[name]()
    first = cuflash.attention(Q, K, V, mask=mask)
    with monkeypatch.context() as patched:
        patched.setattr(Call, "plan", lambda *arguments, **options: pytest.fail("planned again"))
        assert (cuflash.attention(Q, K, V, mask=mask) == first).all()
    owner = weakref.ref(mask)
    before = len(cached("attention"))
    del mask
    assert owner() is None and len(cached("attention")) == before - 1


@pytest.mark.parametrize("name", ["array", "blocks", "sparse blocks", "sparse elements", "function"])
def test_edits_are_seen(name):
    mask = MASKS[name]()
    for _ in range(3):
        o, vjp = cuflash.attention_vjp(Q, K, V, mask=mask)
        dq, dk, dv = vjp(o)
        elements = cuflash.BlockIndex.from_mask(mask, LENGTH, LENGTH, 16).toarray()[0, 0]
        assert_within_bounds(Example(q=Q, k=K, v=V, mask=elements, do=o), o=o, dq=dq, dk=dk, dv=dv)
        for array in arrays_in(mask):
            array[...] = RNG.permuted(array)
            array.flat[0] = not array.flat[0]


def test_edits_of_what_a_function_reads_are_seen(monkeypatch):
    results = []
    for width in (9, 20, 9):
        monkeypatch.setitem(globals(), "WIDTH", width)
        results.append(cuflash.attention(Q, K, V, mask=near))
    assert (results[0] == results[2]).all() and not (results[0] == results[1]).all()


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**32), st.booleans())
def test_a_snapshot_sees_any_bit_of_an_array(dtype, shape, seed, is_strided):
    rng = np.random.default_rng(seed)
    whole = rng.integers(0, 2, (*shape, 2)).astype(dtype)
    array = whole[..., 0] if is_strided else np.ascontiguousarray(whole[..., 0])
    snapshot = Snapshot.of(array)
    assert snapshot.is_current()
    if is_strided:
        whole[..., 1] = 1 - whole[..., 1].astype(np.int8)  # changes only elements outside the view
        assert snapshot.is_current()
    if array.size:
        place = tuple(rng.integers(0, extent) for extent in array.shape)
        array[place] = 1 - int(array[place])
        assert not snapshot.is_current()
        array[place] = 1 - int(array[place])
        assert snapshot.is_current()


def within(distance):
    return distance < settings.width


def width_of(module):
    return module.width


def of_module(module):
    return lambda b, h, i, j: abs(i - j) < module.width


settings, inner = ModuleType("settings"), ModuleType("inner")
settings.width, settings.inner, settings.within = 5, inner, within
inner.most, inner.settings = np.array(9), settings
READERS = {
    "attribute": lambda b, h, i, j: abs(i - j) < settings.width,
    "attribute of a module of it": lambda b, h, i, j: i + settings.inner.most > j,
    "function of it": lambda b, h, i, j: settings.within(abs(i - j)),
    "function": lambda b, h, i, j: np.where(i > 3, within(abs(i - j)), i >= j),
    "attribute of a captured module": of_module(settings),
    "attribute of a default": lambda b, h, i, j, module=settings: abs(i - j) < module.width,
    "attribute of a keyword's default": lambda b, h, i, j, *, module=settings: abs(i - j) < module.width,
    "module that it passes to a function": lambda b, h, i, j: abs(i - j) < width_of(settings),
}


@pytest.mark.parametrize("name", READERS)
def test_edits_of_a_module_that_a_function_reads_are_seen(monkeypatch, name):
    snapshot = Snapshot.of(READERS[name])
    assert snapshot.is_current()
    if name == "attribute of a module of it":
        monkeypatch.setattr(inner, "most", np.array(3))
    else:
        monkeypatch.setattr(settings, "width", 6)
    assert not snapshot.is_current()
    monkeypatch.undo()
    assert snapshot.is_current()


def with_attribute(b, h, i, j):
    return abs(i - j) < with_attribute.width


def test_edits_of_attributes_of_functions_are_seen():
    for mask in (with_attribute, lambda b, h, i, j: abs(i - j) < with_attribute.width):
        with_attribute.width = 5
        near = cuflash.attention(Q, K, V, mask=mask)
        with_attribute.width = 20
        assert not (near == cuflash.attention(Q, K, V, mask=mask)).all()
        with_attribute.width = 5
        assert (near == cuflash.attention(Q, K, V, mask=mask)).all()


def importing(b, h, i, j):
    import settings_of_masks

    return abs(i - j) < settings_of_masks.width


def importing_a_name(b, h, i, j):
    from settings_of_masks import width

    return abs(i - j) < width


def importing_numpy(b, h, i, j):
    import numpy.linalg

    return abs(i - j) < numpy.linalg.norm([3, 4])


def test_functions_that_look_up_values_by_other_means_are_evaluated_at_each_call(monkeypatch):
    monkeypatch.setitem(sys.modules, "settings_of_masks", settings)
    assert Snapshot.of(importing_numpy) is not None
    for mask in (
        importing, importing_a_name,
        lambda b, h, i, j: abs(i - j) < getattr(settings, "width"),
        lambda b, h, i, j: abs(i - j) < vars(settings)["width"],
        lambda b, h, i, j: abs(i - j) < settings.__dict__["width"], lambda b, h, i, j: abs(i - j) < globals()["WIDTH"],
        lambda b, h, i, j: abs(i - j) < eval("WIDTH"), lambda b, h, i, j: importing(b, h, i, j),
        lambda b, h, i, j: np.random.random(i.shape) < 0.5,
    ):  # fmt: skip
        assert Snapshot.of(mask) is None
    near = cuflash.attention(Q, K, V, mask=importing)
    monkeypatch.setattr(settings, "width", 20)
    assert not (near == cuflash.attention(Q, K, V, mask=importing)).all()


class Options:
    width = 5


drawn = np.random.default_rng(0).random
by_element = np.vectorize(lambda i, j: i >= j)


def test_what_cannot_be_compared_has_no_snapshot():
    state = SimpleNamespace(width=3)
    for mask in (
        lambda b, h, i, j: abs(i - j) < state.width, masks.FromFunction(lambda b, h, i, j: i + state.width > j),
        lambda b, h, i, j: abs(i - j) < Options.width, lambda b, h, i, j: drawn(i.shape) < 0.5,
        lambda b, h, i, j: by_element(i, j), partial(near, h=0),
        np.array([[object()]]), scipy.sparse.lil_array(np.eye(3)), scipy.sparse.dok_array(np.eye(3)),
    ):  # fmt: skip
        assert Snapshot.of(mask) is None
    wide = cuflash.attention(Q, K, V, mask=lambda b, h, i, j: abs(i - j) < state.width)
    state.width = 20
    assert not (wide == cuflash.attention(Q, K, V, mask=lambda b, h, i, j: abs(i - j) < state.width)).all()


def test_functions_are_compared_by_all_that_they_read():
    def recursive(b, h, i, j, depth=1):
        return near(b, h, i, j) if depth == 0 else recursive(b, h, i, j, depth - 1)

    snapshot = Snapshot.of(recursive)
    assert snapshot is not None and snapshot.is_current()
    recursive.__defaults__ = (2,)
    assert not snapshot.is_current()
    recursive.__defaults__ = (1,)
    assert snapshot.is_current()
    closure = of_closure(kept_blocks())
    snapshot = Snapshot.of(closure)
    closure.__code__ = of_closure(None).__code__.replace(co_name="other")
    assert not snapshot.is_current()
