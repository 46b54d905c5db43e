"""Training steps of one model with our attention and with another one: times, losses and gradients, compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from harness import Record, time_alternately
from rich.table import Table


class Step(NamedTuple):
    """A step with one attention, which has run once.

    Attributes
    ----------
    call : callable
        Runs the step until the device has finished.
    loss : float
    gradient : array
        The gradients of all weights as one vector.
    """

    call: Callable[[], Any]
    loss: float
    gradient: np.ndarray


def compared(
    steps: Mapping[str, Step], ours: str, ratio: str, facts: Record, *, repeats: int, warmup: int
) -> Iterator[Record]:
    """Yield a record for our step and for the other one, timed alternately.

    Parameters
    ----------
    steps : dict of Step
        Two steps, by the names of their attention.
    ours : str
        The name of ours.
    ratio : str
        The column of our time divided by the other one.
    facts : dict
        Columns that both records begin with.
    """
    timings = time_alternately({name: step.call for name, step in steps.items()}, repeats=repeats, warmup=warmup)
    (other,) = steps.keys() - {ours}
    theirs = steps[other].gradient
    error = float(np.linalg.norm(steps[ours].gradient - theirs) / np.linalg.norm(theirs))
    for name, timing in timings.items():
        is_ours = name == ours
        yield {
            "attention": name, **facts, "ms": timing.median_ms, "spread_ms": timing.spread_ms,
            ratio: timing.median_ms / timings[other].median_ms if is_ours else None, "loss": steps[name].loss,
            "gradient_error": error if is_ours else None,
        }  # fmt: skip


def table_of(records: Sequence[Record], title: str, columns: Sequence[str], ratio: str) -> Table:
    """Return a table of the records of `compared`."""
    result = Table(title=title)
    for column in (*columns, "ms", ratio, "gradient_error"):
        result.add_column(column)
    for row in records:
        ratios = ("" if row[name] is None else f"{row[name]:.3f}" for name in (ratio, "gradient_error"))
        result.add_row(*(str(row[column]) for column in columns), f"{row['ms']:.2f}", *ratios)
    return result
