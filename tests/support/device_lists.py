"""Block indexes of masks with arrays that are test doubles of device arrays, listed by kernels on the simulator.

The host can list any mask without kernels, and is the specification for the lists of kernels.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import device_double
import numpy as np
from cuflash import BlockIndex
from cuflash.blocks.classify import BlockKind
from cuflash.blocks.work_list import ListedWork
from cuflash.executors.sim import Simulator


class DeviceSimulator(Simulator):
    """A simulator with access to the memory of test-double arrays."""

    def address(self, array: Any) -> int:
        return int(getattr(array, "_host", array).ctypes.data)

    mask_address = address

    def maker(self, shape: Any, dtype: Any, axes: Any = None) -> Any:
        make = super().maker(shape, dtype, axes)
        return lambda: device_double.DeviceArray(make())


def install(index: ModuleType, index_maker: ModuleType) -> None:
    """Make indexes of test-double arrays on the simulator, and others as before. Both modules belong to one library."""
    make_on_a_gpu = index.make_on_device

    def make(blocks: Any, mask: Any, shape: Any, block: tuple[int, int], key: Any) -> Any:
        if blocks is None and index.mask_namespace(mask) is device_double.namespace:
            return index_maker.index_of_mask(mask, shape, block, DeviceSimulator())
        return make_on_a_gpu(blocks, mask, shape, block, key)

    index.make_on_device = make


def assert_same_blocks(got, expected):
    """Assert that two indexes on the host list the same blocks, mark the same ones full, and have equal elements."""
    assert (got.batch, got.num_heads, got.block) == (expected.batch, expected.num_heads, expected.block)
    for name in ("indptr", "indices"):
        assert getattr(got, name).dtype == np.int32
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    np.testing.assert_array_equal(got.kinds == BlockKind.FULL, expected.kinds == BlockKind.FULL)
    np.testing.assert_array_equal(got.toarray(), expected.toarray())
    bits = (got.kinds == BlockKind.BITS) & (expected.kinds == BlockKind.BITS)
    np.testing.assert_array_equal(got.bits[got.tiles[bits]], expected.bits[expected.tiles[bits]])


def assert_lists_of(source: Any, got: dict[str, Any], mask: Any) -> None:
    """Assert that lists on the host, by name, are those of a mask on the host, with zeros after the last entry."""
    count = int(got["row_pointers"][-1])
    kinds, tiles, columns = (got[name][:count] for name in ("kinds", "tiles", "kv_blocks"))
    lo, hi = (source.rows.lo, source.rows.hi) if source.is_whole and source.rows is not None else (None, None)
    index = BlockIndex(
        seqlen_q=source.shape.seqlen_q, seqlen_kv=source.shape.seqlen_kv, block=source.block, batch=source.batch,
        num_heads=source.num_heads, indptr=got["row_pointers"], indices=columns, kinds=kinds, tiles=tiles,
        bits=got["bits"], lo=lo, hi=hi,
    )  # fmt: skip
    assert_same_blocks(index, BlockIndex.from_mask(mask, block=source.block, **source.shape._asdict()))
    cells = index._block_rows * index.num_kv_blocks + columns
    assert (tiles == np.where(kinds == BlockKind.BITS, cells, -1)).all()
    for name, expected in ListedWork(index=index).lists.items():
        if name in ("lo", "hi"):
            continue
        assert got[name].dtype == expected.dtype and got[name].shape == source.results[name].shape
        np.testing.assert_array_equal(got[name][: len(expected)], expected, err_msg=name)
        assert not got[name][len(expected) :].any(), name
