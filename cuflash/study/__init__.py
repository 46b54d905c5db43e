"""Studies of calls: recall of sparse masks, surveys of block patterns, rooflines of kernels, and memory sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .command import study_report as study_report

__all__ = ["study_report"]


def __getattr__(name: str) -> Any:
    """Import the command on first use, because the library itself does not need it."""
    if name == "study_report":
        from .command import study_report

        return study_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
