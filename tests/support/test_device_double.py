"""The double refuses exactly what it documents as refused, compared with literal tables."""

from __future__ import annotations

import doctest
import enum
import operator
from typing import Any

import device_double as device
import numpy as np
import pytest
from device_double import DeviceArray, LeavesNamespace, Synchronises

xp = device.namespace
HOST = np.arange(6).reshape(2, 3)


@pytest.fixture
def x() -> DeviceArray:
    return device.to_device(HOST)


def _assigned(x: Any, key: Any, value: Any) -> Any:
    x[key] = value
    return x


class Colour(enum.IntEnum):
    RED = 1


ALLOWED = {
    "operators": lambda x, n: ((1 + x) * 2 - x // 2 > x % 2) & ~(x == 3) | (abs(-x) <= 1),
    "in place": lambda x, n: operator.iadd(x + 0, 1),
    "a NumPy scalar on the left": lambda x, n: np.float32(2) * x,
    "a NumPy scalar on the right": lambda x, n: x * np.float32(2),
    "where": lambda x, n: n.where(x > 2, x, -1),
    "creation": lambda x, n: n.arange(3) + n.zeros((2, 1), n.int32) + n.asarray([1, 2, 3]),
    "lists of arrays": lambda x, n: n.stack([x, x], axis=1),
    "reductions": lambda x, n: x.sum(axis=0) + n.max(x, axis=0) + n.add.reduce(x, axis=0),
    "scalars stay on the device": lambda x, n: x.sum() + x[0, 0],
    "views": lambda x, n: x.T.reshape(-1)[::-1].astype(n.float32),
    "gather": lambda x, n: x[n.arange(2) % 2, :2],
    "several results": lambda x, n: n.broadcast_arrays(x, x[:, :1])[1],
    "divmod": lambda x, n: n.divmod(x, 4)[1],
    "shapes known beforehand": lambda x, n: n.broadcast_to(x.sum(axis=1), (3, 2)).reshape(2, 3),
    "sums along": lambda x, n: n.add.accumulate(x, axis=1) + n.cumsum(x, axis=1),
    "bits": lambda x, n: n.unpackbits(n.packbits(x > 2, bitorder="little"), bitorder="little"),
    "a scalar where a boolean array says": lambda x, n: _assigned(x.copy(), x > 2, -1),
    "search": lambda x, n: n.searchsorted(x.ravel(), x[:, 0]),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_stays_on_the_device_gives_the_values_numpy_gives(x: DeviceArray, name: str) -> None:
    expression = ALLOWED[name]
    result = expression(x, xp)
    assert isinstance(result, DeviceArray)
    np.testing.assert_array_equal(device.to_host(result), expression(HOST, np), strict=True)


SYNCHRONISES = {
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "item": lambda x: x.sum().item(),
    "iteration": lambda x: list(x),
    "range": lambda x: range(x[0, 0]),
    "in": lambda x: 3 in x,
    "get": lambda x: x.get(),
    "__array__": lambda x: np.asarray(x),
    "a numpy dtype": lambda x: np.float32(x.sum()),
    "a function whose result has a size that depends on data": lambda x: xp.nonzero(x),
    "such a method": lambda x: x.nonzero(),
    "where with one argument": lambda x: xp.where(x > 0),
    "a boolean index": lambda x: x[x > 2],
    "an array where a boolean array says": lambda x: _assigned(x, x > 2, x[1]),
    "a slice": lambda x: x.ravel()[: x[0, 2]],
    "a size": lambda x: xp.zeros((2, x[0, 1])),
    "a size by keyword": lambda x: xp.full(shape=(x[0, 1],), fill_value=2),
    "a size of a method": lambda x: x.repeat(x[0, 1]),
    ".reshape": lambda x: x.reshape(x[1, 2] - 2, 2),
    "a number of the host": lambda x: xp.array_equal(x, x),
}


@pytest.mark.parametrize("name", SYNCHRONISES)
def test_what_waits_for_the_device_raises_unless_allowed(x: DeviceArray, name: str) -> None:
    with pytest.raises(Synchronises):
        SYNCHRONISES[name](x)
    with device.transfers_allowed():
        SYNCHRONISES[name](x)


LEAVES = {
    "a host ufunc": lambda x: np.add(x, 1),
    "a host function of a list": lambda x: np.stack([x, x]),
    "a host array on the right": lambda x: x + HOST,
    "a host array on the left": lambda x: HOST == x,
    "a host array as an argument": lambda x: xp.where(x > 0, HOST, 0),
    "a host array sent to the device": lambda x: xp.asarray(HOST),
    "a host array as an index": lambda x: x[np.arange(2)],
    "an enumeration": lambda x: xp.where(x > 0, Colour.RED, 0),
    "a host array assigned": lambda x: operator.setitem(x, slice(None), HOST),
}


@pytest.mark.parametrize("name", LEAVES)
def test_host_functions_and_host_arrays_are_refused(x: DeviceArray, name: str) -> None:
    with pytest.raises(LeavesNamespace):
        LEAVES[name](x)


LACKING = {
    "a function of a CUDA library": lambda x: xp.matmul(x, x),
    "a function that CuPy lacks": lambda x: xp.block(x),
    "packbits along an axis": lambda x: xp.packbits(x > 2, axis=-1),
    "a running maximum": lambda x: xp.maximum.accumulate(x, axis=1),
    "max with a start": lambda x: x.max(initial=0),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_cupy_or_a_minimal_install_lacks_is_refused(x: DeviceArray, name: str) -> None:
    with pytest.raises((AttributeError, NotImplementedError, TypeError)):
        LACKING[name](x)


def test_operations_are_counted(x: DeviceArray) -> None:
    with device.counted() as operations:
        xp.where(x > 2, x[:, :1] + 1, 0)
    assert operations() == 3


def test_facts_need_no_transfer_and_hide_no_host_array(x: DeviceArray) -> None:
    assert (len(x), x.shape, x.ndim, x.dtype, xp.result_type(x, np.int8)) == (2, (2, 3), 2, np.int64, np.int64)
    assert "DeviceArray(shape=(2, 3)" in repr(x)
    assert not isinstance(x, np.ndarray) and isinstance(x, x.__array_namespace__().ndarray)


def test_its_example() -> None:
    assert doctest.testmod(device, optionflags=doctest.IGNORE_EXCEPTION_DETAIL).failed == 0
