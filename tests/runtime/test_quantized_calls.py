"""Repeated FP8 calls on a GPU are planned once, also if kernels list the blocks of their masks."""

from __future__ import annotations

from typing import Any

import cupy_machine
import ml_dtypes  # noqa: F401 (registers the name bfloat16)
import numpy as np
from cached_calls import cached
import pytest
from cuflash import BlockIndex, Quantized, masks
from cuflash.calls import _forward
from executors import needs_compiler

import cuflash

LENGTH, BLOCK = 200, (64, 64)
RNG = np.random.default_rng(0)
X8 = [cuflash.quantize(x) for x in RNG.standard_normal((3, 2, LENGTH, 64), dtype=np.float32)]


@pytest.fixture
def cupy(tmp_path: Any, monkeypatch: Any) -> Any:
    with cupy_machine.installed(monkeypatch, tmp_path / "cache") as machine:
        yield machine


def on_device(machine: Any, x8: Quantized) -> Quantized:
    arrays = {"data": machine.asarray(x8.data.view(np.uint8)), "scale": machine.asarray(x8.scale)}
    return Quantized(**arrays, per=x8.per, block=x8.block, rotation=None, source_dtype=x8.source_dtype)


def allowed_blocks(seed: int) -> Any:
    return np.random.default_rng(seed).random((2, 4, 4)) < 0.6


def offsets(seed: int) -> Any:
    return np.array([0, 90 + seed, LENGTH], np.int32)


# Masks on the host and on a device; those with one name differ only in the contents of their arrays.
MASKS = {
    "an index": (
        lambda seed: masks.BlockPattern(allowed_blocks(seed), BLOCK),
        lambda seed, send: BlockIndex.from_blocks(send(allowed_blocks(seed)), LENGTH, LENGTH, BLOCK),
    ),
    "an index of larger blocks": (
        lambda seed: masks.BlockPattern(allowed_blocks(seed)[:, :1, :1], 1024),
        lambda seed, send: BlockIndex.from_blocks(send(allowed_blocks(seed)[:, :1, :1]), LENGTH, LENGTH, 1024),
    ),
    "blocks": (
        lambda seed: masks.BlockPattern(allowed_blocks(seed), BLOCK),
        lambda seed, send: masks.BlockPattern(send(allowed_blocks(seed)), BLOCK),
    ),
    "sequences": (
        lambda seed: masks.Sequences(offsets(seed)), lambda seed, send: masks.Sequences(send(offsets(seed)))
    ),
}  # fmt: skip


def is_right(o: Any, mask: Any) -> bool:
    """True if results are within the kernel's error bound."""
    allowed = mask.toarray(LENGTH, num_heads=2)
    exact, _ = cuflash.reference.attention(*(x.scaled(np.float64) for x in X8), mask=allowed)
    bound = cuflash.error_bound(*X8, mask=allowed, product_dtype=X8[0].data.dtype).o
    return bool((np.abs(o - exact) <= bound).all())


@needs_compiler
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_one_layout_are_planned_once(cupy: Any, monkeypatch: Any, name: str) -> None:
    on_host, on_its_device = MASKS[name]
    x8, plans, planned = [on_device(cupy, x) for x in X8], [], _forward.planned
    monkeypatch.setattr(
        _forward, "planned", lambda *arguments, **more: plans.append(planned(*arguments, **more)) or plans[-1]
    )
    for seed in range(3):
        o = cuflash.attention(*x8, mask=on_its_device(seed, cupy.asarray))
        assert is_right(o.get(), on_host(seed))
    assert len(plans) == len(cached("attention")) == 1


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize("name", MASKS)
def test_a_gpu_reads_each_mask(name: str) -> None:
    import cupy

    on_host, on_its_device = MASKS[name]
    x8 = [on_device(cupy, x) for x in X8]
    for seed in range(3):
        assert is_right(cuflash.attention(*x8, mask=on_its_device(seed, cupy.asarray)).get(), on_host(seed))


def operands(columns: int, dtype: str) -> list[Any]:
    """Return q, k and v with fewer heads and other lengths of k and v; one block has NaN, and one only zeros."""
    rng = np.random.default_rng(columns)
    q, k, v = (rng.standard_normal((2, *shape, columns)).astype(dtype) for shape in ((4, 77), (2, 150), (2, 150)))
    v[0, 1, 140, 3], k[1, 0] = np.nan, 0
    return [q, k, v]


def require_bits(together: Any, alone: Any) -> None:
    for name, x8, right in zip("qkv", together, alone):
        np.testing.assert_array_equal(x8.scale.get(), right.scale, name)
        np.testing.assert_array_equal(x8.data.get(), right.data.view(np.uint8), name)
        assert (x8.rotation, x8.block, x8.source_dtype) == (right.rotation, right.block, right.source_dtype)
    np.testing.assert_array_equal(together[2].transposed().get(), alone[2].transposed())


CASES = [
    (64, "float16", 32, True), (128, "bfloat16", 128, True), (64, "float32", 64, False), (48, "float16", 32, False),
]  # fmt: skip


@pytest.mark.parametrize("columns, dtype, block, rotates", CASES)
def test_operands_are_quantised_together_or_alone(columns: int, dtype: str, block: int, rotates: bool) -> None:
    x, rotation = operands(columns, dtype), cuflash.Rotation(columns) if rotates else None
    together = cuflash.quantize(*x, block=block, rotate=rotation)
    for x8, right in zip(together, [cuflash.quantize(each, block=block, rotate=rotation) for each in x[:2]]):
        np.testing.assert_array_equal(x8.data.view(np.uint8), right.data.view(np.uint8))
    assert together[2].rotation is None
    np.testing.assert_array_equal(together[2].scale, cuflash.quantize(x[2], block=block).scale)


@needs_compiler
@pytest.mark.parametrize("columns, dtype, block, rotates", CASES[:1])
def test_one_kernel_prepares_a_call(cupy: Any, columns: int, dtype: str, block: int, rotates: bool) -> None:
    x, options = operands(columns, dtype), {"block": block, "rotate": cuflash.Rotation(columns) if rotates else None}
    together = cuflash.quantize(*map(cupy.asarray, x), **options)
    require_bits(together, cuflash.quantize(*x, **options))
    assert cupy.launched == ["quantize"]
    v8 = cuflash.quantize(cupy.asarray(x[2]), block=block)
    np.testing.assert_array_equal(v8.transposed().get(), together[2].transposed().get())
    assert cupy.launched == ["quantize", "quantize", "transpose"]


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize("columns, dtype, block, rotates", CASES)
def test_a_gpu_prepares_a_call_with_the_bits_of_the_host(columns: int, dtype: str, block: int, rotates: bool) -> None:
    import cupy

    x, options = operands(columns, dtype), {"block": block, "rotate": cuflash.Rotation(columns) if rotates else None}
    require_bits(cuflash.quantize(*map(cupy.asarray, x), **options), cuflash.quantize(*x, **options))
