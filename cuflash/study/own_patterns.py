"""Patterns of one's own in a study: a mask or a function by its import path, and blocks from an .npz file."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Array, describe, is_array
from ..errors import UnsupportedProblem
from ..masks import BlockPattern, Mask
from ..masks.arrays import Indexed

OwnPattern = Callable[..., Any]  # (q, k, *, block, density, causal) -> what `mask=` takes
_SUFFIX = ".npz"


def is_own(text: str) -> bool:
    """Return whether a word names a pattern of one's own: MODULE:NAME, FILE.npz or FILE.npz:ARRAY."""
    return ":" in text or text.endswith(_SUFFIX)


def loaded(text: str) -> OwnPattern:
    """Return the function that a word stands for.

    Parameters
    ----------
    text : str
        MODULE:NAME of a mask, or of a function ``(q, k, *, block, density, causal)`` that returns what ``mask=`` takes
        and should keep at most `density` of the blocks; or FILE.npz, or FILE.npz:ARRAY if the file holds several, of
        booleans [..., grid, grid], one for each block.

    Returns
    -------
    callable
        The function; a mask and blocks are the same for every density.

    Raises
    ------
    UnsupportedProblem
        There is no such module, name, file or array.
    """
    if _SUFFIX in text:
        path, _, name = text.rpartition(":") if not text.endswith(_SUFFIX) else (text, "", "")
        blocks = _blocks(Path(path), name)
        return lambda q, k, *, block, density, causal: BlockPattern(blocks, block)
    sys.path.insert(0, "")  # the current folder, which the command has and a script need not have
    try:
        importlib.invalidate_caches()
        value: Any = pkgutil.resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        told = str(error).partition("\n")[0]
        raise UnsupportedProblem(
            [f"{text} must be MODULE:NAME of a module in this folder or of an installed one; {told}"]
        ) from error
    finally:
        sys.path.remove("")
    is_mask = isinstance(value, (Mask, Indexed)) or is_array(value)
    if is_mask and not isinstance(value, type):
        return lambda q, k, *, block, density, causal: value
    if not callable(value):
        rule = f"{text} must be a mask, or a function of (q, k, *, block, density, causal)"
        raise UnsupportedProblem([f"{rule}; got {describe(value)}"])
    function: OwnPattern = value
    return function


def _blocks(path: Path, name: str) -> Array:
    """The booleans of an .npz file."""
    try:
        with np.load(path) as archive:
            names = [name] if name else archive.files
            missing = [each for each in names if each not in archive.files]
            arrays = [] if missing else [archive[each] for each in names]
            there = ", ".join(archive.files) or "nothing"
    except FileNotFoundError:
        raise UnsupportedProblem([f"{path} must be an .npz file; there is no such file"]) from None
    except Exception as error:  # whatever a broken archive gives
        told = str(error).partition("\n")[0]
        raise UnsupportedProblem([f"{path} must be an .npz file, as numpy.savez writes it; got {told}"]) from error
    if len(arrays) != 1:
        raise UnsupportedProblem([f"{path} must hold one array, or name one: {path}:ARRAY; got {there}"])
    if arrays[0].dtype != np.bool_ or arrays[0].ndim < 2:
        rule = f"{path} must hold booleans [..., grid, grid], one for each block"
        raise UnsupportedProblem([f"{rule}; got {describe(arrays[0])}: write blocks != 0"])
    blocks: Array = arrays[0]
    return blocks
