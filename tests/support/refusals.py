"""The reasons of a refused call, or the message of its error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import cuflash


def reasons_of(call: Callable[..., Any], *arrays: Any, **options: Any) -> tuple[str, ...]:
    """Return the reasons for which a call is refused."""
    with pytest.raises(cuflash.UnsupportedProblem) as caught:
        call(*arrays, **options)
    return caught.value.reasons


def refused(call: Callable[[], Any]) -> str:
    """Return the message with which a call is refused."""
    with pytest.raises((cuflash.UnsupportedProblem, TypeError)) as caught:
        call()
    return str(caught.value)


def require_reasons(call: Callable[[], Any], starts: Sequence[str]) -> None:
    """Require that a call is refused for reasons that start like these, in any order, and for no others."""
    reasons = reasons_of(call)
    assert len(reasons) == len(starts), reasons
    for start in starts:
        assert any(reason.startswith(start) for reason in reasons), reasons
