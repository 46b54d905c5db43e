"""The one exception for problems that cuflash does not solve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UnsupportedProblem(ValueError):
    """Raised before any work, with every reason at once.

    >>> error = UnsupportedProblem(["head_dim must be 1..256; got 320", "scale must be finite; got inf"])
    >>> error.reasons
    ('head_dim must be 1..256; got 320', 'scale must be finite; got inf')
    >>> print(error)
    2 reasons:
    - head_dim must be 1..256; got 320
    - scale must be finite; got inf

    Attributes
    ----------
    reasons : tuple of str
        One sentence each: the argument, the rule, what came, and what would work.
    """

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(self.reasons)

    def __str__(self) -> str:
        if len(self.reasons) == 1:
            return self.reasons[0]
        return "\n- ".join([f"{len(self.reasons)} reasons:", *self.reasons])


@contextmanager
def collecting(reasons: list[str]) -> Iterator[None]:
    """Append the reasons of an UnsupportedProblem raised inside to `reasons` instead of letting it out."""
    try:
        yield
    except UnsupportedProblem as error:
        reasons.extend(error.reasons)
