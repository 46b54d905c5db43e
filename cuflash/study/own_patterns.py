"""Users' own patterns in a study: a mask or a function named by its import path, or blocks from an .npz file."""

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

OwnPattern = Callable[..., Any]  # (q, k, *, block, density, causal) -> value for `mask=`
_SUFFIX = ".npz"


def is_own(text: str) -> bool:
    """True if a word names a user's own pattern: MODULE:NAME, FILE.npz or FILE.npz:ARRAY."""
    return ":" in text or text.endswith(_SUFFIX)


def loaded(text: str) -> OwnPattern:
    """Return the pattern that a word names, as a function.

    Parameters
    ----------
    text : str
        MODULE:NAME of a mask, or of a function ``(q, k, *, block, density, causal)`` that returns a value for ``mask=``
        and should keep at most `density` of the blocks. Or FILE.npz with booleans [..., grid, grid], one for each
        block; FILE.npz:ARRAY if the file holds several arrays.

    Returns
    -------
    callable
        The function. It ignores the density if `text` names a mask or an array.

    Raises
    ------
    UnsupportedProblem
        The module, name, file or array does not exist.
    """
    if _SUFFIX in text:
        path, _, name = text.rpartition(":") if not text.endswith(_SUFFIX) else (text, "", "")
        blocks = _blocks(Path(path), name)
        return lambda q, k, *, block, density, causal: BlockPattern(blocks, block)
    sys.path.insert(0, "")  # the current folder, which may be missing from the path in scripts
    try:
        importlib.invalidate_caches()
        value: Any = pkgutil.resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        message = str(error).partition("\n")[0]
        raise UnsupportedProblem(
            f"{text} must be MODULE:NAME of a module in this folder or of an installed module; {message}"
        ) from error
    finally:
        sys.path.remove("")
    is_mask = isinstance(value, (Mask, Indexed)) or is_array(value)
    if is_mask and not isinstance(value, type):
        return lambda q, k, *, block, density, causal: value
    if not callable(value):
        rule = f"{text} must be a mask, or a function of (q, k, *, block, density, causal)"
        raise UnsupportedProblem(f"{rule}; got {describe(value)}")
    function: OwnPattern = value
    return function


def _blocks(path: Path, name: str) -> Array:
    """Return the boolean array of an .npz file."""
    try:
        with np.load(path) as archive:
            names = [name] if name else archive.files
            missing = [each for each in names if each not in archive.files]
            arrays = [] if missing else [archive[each] for each in names]
            contents = ", ".join(archive.files) or "nothing"
    except FileNotFoundError:
        raise UnsupportedProblem(f"{path} must be an .npz file; the file does not exist") from None
    except Exception as error:  # a broken archive may raise any error
        message = str(error).partition("\n")[0]
        raise UnsupportedProblem(f"{path} must be an .npz file of numpy.savez; got {message}") from error
    if len(arrays) != 1:
        raise UnsupportedProblem(f"{path} must hold one array; got {contents}: use {path}:ARRAY to name one")
    if arrays[0].dtype != np.bool_ or arrays[0].ndim < 2:
        rule = f"{path} must hold booleans [..., grid, grid], one for each block"
        raise UnsupportedProblem(f"{rule}; got {describe(arrays[0])}: write blocks != 0")
    blocks: Array = arrays[0]
    return blocks
