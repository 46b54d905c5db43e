"""A pytest plugin that records the class and message of each refusal that a test expects: `-p expected_refusals`.

The environment variable CUFLASH_REFUSALS names the folder of its files, one for each process. A refusal is an exception
that a function of the library raises inside `pytest.raises`.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Any

import cuflash
import pytest

LIBRARY = str(Path(cuflash.__file__).parent)
# Parts of texts that depend on the run or on line numbers: folders of the source tree, of another tree that compiled a
# cached kernel, and of that cache; addresses; temporary folders.
_VARYING = (
    (re.compile(r"/[\w./-]+(?=/cuflash/\w+/)"), "..."),
    (re.compile(r"0x[0-9a-f]+"), "0x..."), (re.compile(r"/tmp/[^\s:,']+"), "/tmp/..."),
    (re.compile(r", line \d+"), ", line ..."), (re.compile(r"(\.cuh?):\d+"), r"\1:..."),
)  # fmt: skip
_expected: set[tuple[str, str]] = set()
_exit = pytest.RaisesExc.__exit__


def refusal(error: BaseException) -> tuple[str, str]:
    """Return the class and message of an exception, without parts that depend on the run."""
    text = str(error).replace(str(Path(LIBRARY).parent), "...")
    for pattern, constant in _VARYING:
        text = pattern.sub(constant, text)
    return type(error).__name__, text


def _passes_through_library(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename.startswith(LIBRARY):
            return True
        traceback = traceback.tb_next
    return False


def _keeping_exit(self: Any, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> bool:
    is_expected = _exit(self, kind, error, traceback)
    if is_expected and error is not None and _passes_through_library(traceback):
        _expected.add(refusal(error))
    return is_expected


def pytest_configure() -> None:
    pytest.RaisesExc.__exit__ = _keeping_exit  # type: ignore[method-assign]


def pytest_unconfigure() -> None:
    pytest.RaisesExc.__exit__ = _exit  # type: ignore[method-assign]
    path = Path(os.environ["CUFLASH_REFUSALS"]) / f"{os.getpid()}.json"
    path.write_text(json.dumps(sorted(_expected)), "utf-8")
