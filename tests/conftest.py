"""Shared setup of the tests: Hypothesis profiles (CUFLASH_PROFILE=ci, dev or long), the gpu marker, and fixtures."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import device_double
import device_lists
import numpy as np
import pytest
import threadpoolctl
from cuflash.blocks import index as indices
from cuflash.compiler import nvrtc as compiling
from cuflash.compiler import source as sources
from cuflash.executors import index_maker
from cuflash.planning.spec import Entry, KernelSpec
from hypothesis import HealthCheck, settings

# Timings on a busy machine say nothing about the code: no deadline, and slow examples are not failures.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=25, derandomize=True, database=None, print_blob=True, **_COMMON)
settings.register_profile("dev", max_examples=100, **_COMMON)
settings.register_profile("long", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("CUFLASH_PROFILE", "ci"))

# Tests of arrays that are sharded over devices; JAX reads it when it is first used.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
device_lists.install(indices, index_maker)


def pytest_configure(config: pytest.Config) -> None:
    """Limit BLAS to one thread in each worker of pytest-xdist, since the workers together occupy all cores."""
    if hasattr(config, "workerinput"):
        threadpoolctl.threadpool_limits(1, user_api="blas")


def _why_no_gpu() -> str | None:
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    except Exception as error:  # CuPy's CUDARuntimeError has no base class that is available without CuPy
        return f"CuPy finds no GPU ({error})"
    return None if count else "CuPy finds no GPU"


def _why_not_of(major: int, minor: int) -> str | None:
    import cupy

    capability = cupy.cuda.Device().compute_capability
    wanted = f"{major}{minor}"
    return None if capability == wanted else f"the GPU must have compute capability {wanted}; it has {capability}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else None
    for item in marked:
        wanted = item.get_closest_marker("gpu").args
        why = reason or (_why_not_of(*wanted) if wanted else None)
        if why:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="module", autouse=True)
def _earlier_objects_are_hidden() -> None:
    """Hide all earlier objects from the garbage collector, which visits them in each of the many tests that call it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device() -> ModuleType:
    """Return the test double of CuPy: device.to_device, device.to_host, device.namespace, device.transfers_allowed."""
    return device_double


@pytest.fixture(scope="session")
def nvrtc() -> tuple[int, int]:
    """Return the version of NVRTC.

    A test with this fixture skips if no NVRTC wheel exists for the platform, and fails if the wheel is not installed.
    """
    try:
        return compiling.nvrtc_version()
    except RuntimeError as error:
        if sys.platform in ("linux", "win32"):
            raise
        pytest.skip(f"{sys.platform} has no wheels of NVRTC ({error})")


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copy kernels_cu/ and add the kernels of tests/support/kernels/; texts are generated from the copy."""
    folder = tmp_path / "kernels_cu"
    for original in (sources.KERNELS, Path(__file__).parent / "support" / "kernels"):
        shutil.copytree(original, folder, dirs_exist_ok=True)
    monkeypatch.setattr(sources, "KERNELS", folder)
    sources.source.cache_clear()
    yield folder
    sources.source.cache_clear()


@pytest.fixture
def spec() -> Callable[..., sources.KernelSpec]:
    """Return a function that creates the specification of a small simt kernel; its arguments replace fields."""

    def make(name: str = "plain", family: str = "simt", **fields: object) -> KernelSpec:
        small = {"head_dim": 64, "value_dim": 64, "block_q": 32, "block_kv": 32, "dtype": np.dtype(np.float32)}
        return KernelSpec(**{**small, "entry": Entry(family=family, name=name), **fields})

    return make


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Yield a test double of CuPy that runs kernels on the simulator."""
    import cupy_machine

    with cupy_machine.installed(monkeypatch, tmp_path / "cache") as machine:
        yield machine
