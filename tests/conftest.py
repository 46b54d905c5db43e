"""Hypothesis profiles (CUFLASH_PROFILE=ci, dev or long), the gpu marker, and arrays of a device that is not there."""

from __future__ import annotations

import os
from types import ModuleType

import device_double
import pytest
from hypothesis import HealthCheck, settings

# Timings on a busy machine say nothing about the code: no deadline, and slow examples are no failure.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=25, derandomize=True, database=None, print_blob=True, **_COMMON)
settings.register_profile("dev", max_examples=100, **_COMMON)
settings.register_profile("long", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("CUFLASH_PROFILE", "ci"))


def _why_no_gpu() -> str | None:
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    except Exception as error:  # CUDARuntimeError has no base class that can be named without CuPy
        return f"CuPy finds no GPU ({error})"
    return None if count else "CuPy finds no GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else None
    for item in marked if reason else []:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> ModuleType:
    """The stand-in for CuPy: device.to_device, device.to_host, device.namespace, device.transfers_allowed."""
    return device_double
