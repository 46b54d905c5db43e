"""Hypothesis profiles (CUFLASH_PROFILE=ci, dev or long), the gpu marker, a device that is not there, test kernels."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import device_double
import numpy as np
import pytest
import threadpoolctl
from cuflash.compiler import nvrtc as compiling
from cuflash.compiler import source as sources
from cuflash.planning.spec import KernelSpec
from hypothesis import HealthCheck, settings

# Timings on a busy machine say nothing about the code: no deadline, and slow examples are no failure.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=25, derandomize=True, database=None, print_blob=True, **_COMMON)
settings.register_profile("dev", max_examples=100, **_COMMON)
settings.register_profile("long", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("CUFLASH_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    """BLAS on one thread where tests run side by side: a worker for each core, and threads that spin on all of them."""
    if hasattr(config, "workerinput"):
        threadpoolctl.threadpool_limits(1, user_api="blas")


def _why_no_gpu() -> str | None:
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    except Exception as error:  # CUDARuntimeError has no base class that can be named without CuPy
        return f"CuPy finds no GPU ({error})"
    return None if count else "CuPy finds no GPU"


def _why_not_of(major: int, minor: int) -> str | None:
    import cupy

    found = cupy.cuda.Device().compute_capability
    wanted = f"{major}{minor}"
    return None if found == wanted else f"the GPU must have compute capability {wanted}; it has {found}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else None
    for item in marked:
        wanted = item.get_closest_marker("gpu").args
        why = reason or (_why_not_of(*wanted) if wanted else None)
        if why:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def device() -> ModuleType:
    """The stand-in for CuPy: device.to_device, device.to_host, device.namespace, device.transfers_allowed."""
    return device_double


@pytest.fixture(scope="session")
def nvrtc() -> tuple[int, int]:
    """The version of NVRTC, without which a test makes no sense; the test extra installs it where there is a wheel."""
    try:
        return compiling.nvrtc_version()
    except RuntimeError as error:
        if sys.platform in ("linux", "win32"):
            raise
        pytest.skip(f"{sys.platform} has no wheels of NVRTC ({error})")


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of kernels_cu/ with the kernels of tests/support/kernels/ in it, which sources are made of meanwhile."""
    folder = tmp_path / "kernels_cu"
    for original in (sources.KERNELS, Path(__file__).parent / "support" / "kernels"):
        shutil.copytree(original, folder, dirs_exist_ok=True)
    monkeypatch.setattr(sources, "KERNELS", folder)
    sources.source.cache_clear()
    yield folder
    sources.source.cache_clear()


@pytest.fixture
def spec() -> Callable[..., sources.KernelSpec]:
    """spec("plain", head_dim=128): a kernel's specification, simt and small but for what is said."""

    def make(entry: str = "plain", **fields: object) -> KernelSpec:
        small = {"family": "simt", "head_dim": 64, "value_dim": 64, "block_q": 32, "block_kv": 32}
        return KernelSpec(**{**small, "entry": entry, "dtype": np.dtype(np.float32), **fields})

    return make
