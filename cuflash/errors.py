"""The exceptions for unsupported problems and for kernels that do not compile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from .keywords import explains_keywords

_Class = TypeVar("_Class", bound=type)
_LOG_LINES = 40  # lines of a compiler log that an error message shows


@explains_keywords
class UnsupportedProblem(ValueError):
    """The error for arguments that cuflash does not support, raised before any work, with every reason at once.

    Parameters
    ----------
    reasons : str or iterable of str
        One sentence each: the argument, the rule, the value that was passed, and what would work.

    Examples
    --------
    >>> error = UnsupportedProblem(["head_dim must be 1..256; got 320", "scale must be finite; got inf"])
    >>> error.reasons
    ('head_dim must be 1..256; got 320', 'scale must be finite; got inf')
    >>> print(error)
    2 reasons:
    - head_dim must be 1..256; got 320
    - scale must be finite; got inf
    """

    def __init__(self, reasons: str | Iterable[str]) -> None:
        self.reasons = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        super().__init__(self.reasons)

    def __str__(self) -> str:
        if len(self.reasons) == 1:
            return self.reasons[0]
        return "\n- ".join([f"{len(self.reasons)} reasons:", *self.reasons])


@explains_keywords
class CompileError(RuntimeError):
    """The error for a kernel that NVRTC rejects: a bug in cuflash, or an NVRTC version that it does not support.

    Parameters
    ----------
    kernel, architecture : str
        The kernel's name with its specification, and the architecture that it was compiled for.
    log : str
        NVRTC's messages, whose line numbers refer to files of `kernels_cu`.
    text : str
        Path of the source text that was compiled, if CUFLASH_DUMP was set.

    Examples
    --------
    >>> print(CompileError("simt_forward head_dim 64", "sm_90", "kernels_cu/simt/forward.cu(7): error: expected a ;"))
    simt_forward head_dim 64 does not compile for sm_90:
    kernels_cu/simt/forward.cu(7): error: expected a ;
    set CUFLASH_DUMP=<folder> in the environment to write the source text that the compiler saw
    """

    def __init__(self, kernel: str, architecture: str, log: str, text: str = "") -> None:
        self.kernel, self.architecture, self.log, self.text = kernel, architecture, log, text
        super().__init__(kernel, architecture, log, text)

    def __str__(self) -> str:
        advice = "set CUFLASH_DUMP=<folder> in the environment to write the source text that the compiler saw"
        if self.text:
            advice = f"the source text that the compiler saw is in {self.text}"
        lines = self.log.splitlines()
        if len(lines) > _LOG_LINES:
            lines[_LOG_LINES:] = [f"... {len(lines) - _LOG_LINES} more lines in .log"]
        return "\n".join([f"{self.kernel} does not compile for {self.architecture}:", *lines, advice])


def refuse(reasons: Collection[str]) -> None:
    """Raise an UnsupportedProblem with these reasons, if there are any."""
    if reasons:
        raise UnsupportedProblem(reasons)


@contextmanager
def collecting(reasons: list[str]) -> Iterator[None]:
    """Catch an UnsupportedProblem raised in the `with` block, and append its reasons to `reasons`."""
    try:
        yield
    except UnsupportedProblem as error:
        reasons.extend(error.reasons)


_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "matmul": "@", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "lshift": "<<", "rshift": ">>", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
_UNARY_SIGNS = {"neg": "unary -", "pos": "unary +", "invert": "~", "abs": "abs()"}


def without_other_operators(cls: _Class, subject: str, fix: str) -> _Class:
    """Make every arithmetic operator that a class lacks raise a TypeError that names a fix, not Python's own error.

    Parameters
    ----------
    cls : class
        The class, which is changed in place and returned.
    subject : str
        The plural noun for objects of the class in the error message.
    fix : str
        What to write instead.
    """

    def refusing(sign: str) -> Callable[..., Any]:
        def operator(*_: Any) -> Any:
            raise TypeError(f"{subject} have no {sign}: {fix}")

        return operator

    signs = _SIGNS | {f"r{name}": sign for name, sign in _SIGNS.items()} | _UNARY_SIGNS
    for name, sign in signs.items():
        if not any(f"__{name}__" in vars(base) for base in cls.__mro__):
            setattr(cls, f"__{name}__", refusing(sign))
    return cls
