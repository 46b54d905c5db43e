"""How near do tangents and second derivatives of drawn examples come to their error bounds? A ledger that adds up.

    python -m experiments tangent_sweep --seconds 600
    python -m experiments tangent_sweep --dtypes bfloat16 --publish      # into the kept ledger

Draws examples with tangents from `cuflash.testing.tangents.movings`, a third each with a score function, with a sink
and dropout, and with neither, and runs all four passes on the CPU. Each example is checked in three ways, and the
largest quotient of a difference and its bound is kept for each:

- the tangents of o, lse and the gradients against the reference in a finer dtype;
- `duality`: <do, o_dot> + <dlse, lse_dot> against <dq, q_dot> + <dk, k_dot> + <dv, v_dot> + <dsink, sink_dot>;
- `symmetry`: <h, H g> against <g, H h> for the Hessian H and two directions.

A row is for a dtype. `unbounded` counts identities without a finite bound, in examples with huge values. `batches`
numbers the seeds, so that a run continues with examples that none before has drawn.

Expect: no quotient above 1; exit status 0, otherwise 1.
Found:  none above 1; the number of examples is in the ledger.

Cost: 0.3 s of a core for an example.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cuflash
import hypothesis
import numpy as np
from cuflash.testing import Example
from cuflash.testing.tangents import Moving, assert_tangents_within_bounds, movings, with_tangents
from harness import Record, check_names, machine, one_thread, parse_config, read_csv, write_csv
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

DTYPES = ("float16", "bfloat16", "float32", "float64")
COUNTS = ("examples", "outside", "unbounded")
PROPERTIES = ("o_dot", "lse_dot", "dq_dot", "dk_dot", "dv_dot", "dsink_dot", "duality", "symmetry")
MOVED = ("q", "k", "v", "sink")  # arrays of the two identities
SMALL = {"most_scores": 1 << 9, "most_rows": 120, "widest": 24, "longest": 60}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a run."""

    seconds: float = field(default=300.0, metadata={"help": "when to stop; a batch that has begun is finished"})
    dtypes: tuple[str, ...] = DTYPES
    size: int = field(default=100, metadata={"help": "examples of a batch"})

    def __post_init__(self) -> None:
        check_names(self, {"dtypes": DTYPES})
        if min(self.seconds, self.size) <= 0:
            raise ValueError("seconds and size must be positive")


def drawn(dtype: str) -> st.SearchStrategy[Moving]:
    """Return a strategy for examples with tangents."""
    room = SMALL | {"dtypes": (dtype,)}
    return st.one_of(movings(**room), movings(**room, has_sink=True, has_dropout=True), movings(**room, has_score=True))


def options_of(example: Example) -> dict[str, Any]:
    """Return the keywords of a call, except its arrays."""
    named = ("mask", "scale", "score", "dropout", "sink")
    return {name: getattr(example, name) for name in named if getattr(example, name) is not None}


def push(moving: Moving) -> dict[str, np.ndarray]:
    """Return the tangents of o and lse."""
    example = moving.example
    _, dots = cuflash.attention_jvp(
        example.q, example.k, example.v, **moving.of_call(), **options_of(example), return_lse=True
    )
    return dict(zip(("o_dot", "lse_dot"), dots))


def pull(moving: Moving) -> dict[str, np.ndarray]:
    """Return the tangents of gradients."""
    example = moving.example
    wrt = ("sink",) if example.sink is not None else ()
    _, _, dots = cuflash.attention_hvp(
        example.q, example.k, example.v, example.do, dlse=example.dlse, **moving.of_call(has_gradients=True),
        **options_of(example), wrt=wrt,
    )  # fmt: skip
    return dict(zip(("dq_dot", "dk_dot", "dv_dot"), dots)) | {f"d{name}_dot": dots[name] for name in wrt}


def inner(first: Any, other: Any) -> float:
    """Return an inner product in float64."""
    with np.errstate(all="ignore"):  # of values and bounds that are infinite
        return float(np.sum(np.asarray(first, np.float64) * np.asarray(other, np.float64)))


def quotient(sides: tuple[float, float], off: float, size: float) -> float:
    """Return the difference of two numbers over its bound, which allows for rounding of sums of this size.

    NaN if the bound is not finite.
    """
    difference, bound = abs(sides[0] - sides[1]), off + 1e-12 * size
    if not math.isfinite(bound):
        return math.nan
    return 0.0 if difference == 0 else difference / bound if bound else math.inf


def duality(moving: Moving) -> float:
    """Return the quotient of the two sides of duality; 0 if neither q, k, v nor the sink has a tangent."""
    example, dots = moving.example, {name: x for name, x in moving.tangents.items() if name in MOVED}
    if not dots:
        return 0.0
    moving = Moving(example, dots)
    pushed, wrt = push(moving), ("sink",) if example.sink is not None else ()
    _, vjp = cuflash.attention_vjp(example.q, example.k, example.v, **options_of(example), wrt=wrt)
    gradients = vjp(example.do, example.dlse)
    named = dict(zip("qkv", gradients)) | {name: gradients[name] for name in wrt}
    cotangents = {"o_dot": example.do} | ({} if example.dlse is None else {"lse_dot": example.dlse})
    left = [(x, pushed[name], getattr(moving.bounds, name)) for name, x in cotangents.items()]
    right = [(x, named[name], getattr(example.bounds, f"d{name}")) for name, x in dots.items()]
    sides = tuple(sum(inner(x, y) for x, y, _ in each) for each in (left, right))
    off = sum(inner(np.abs(x), bound) for x, _, bound in (*left, *right))
    return quotient(sides, 2 * off, sum(inner(np.abs(x), np.abs(y)) for x, y, _ in (*left, *right)))


def symmetry(moving: Moving) -> float:
    """Return the quotient of the two sides of the Hessian's symmetry."""
    example = moving.example
    names = [name for name in MOVED if getattr(example, name) is not None]
    one, two = (with_tangents(example, dict.fromkeys(names, "normal"), seed=seed) for seed in (1, 2))
    sides, off, size = [], 0.0, 0.0
    for first, other in ((one, two), (two, one)):
        dots = pull(first)
        pairs = [(other.tangents[name], f"d{name}_dot") for name in names]
        sides.append(sum(inner(x, dots[name]) for x, name in pairs))
        off += sum(inner(np.abs(x), getattr(first.bounds, name)) for x, name in pairs)
        size += sum(inner(np.abs(x), np.abs(dots[name])) for x, name in pairs)
    return quotient((sides[0], sides[1]), off, size)


def quotients(moving: Moving) -> dict[str, float]:
    """Return the quotient of each property of an example; infinite if a tangent is outside its bound."""
    results = (push(moving) if moving.of_call() else {}) | pull(moving)
    shares = {"duality": duality(moving), "symmetry": symmetry(moving)}
    for name, result in results.items():
        try:
            shares[name] = assert_tangents_within_bounds(moving, **{name: result})
        except AssertionError:
            shares[name] = math.inf
    return shares


def draw(dtype: str, number: int, size: int) -> Record:
    """Draw the examples of a batch; return its counts and largest quotients."""
    row = empty_row()

    @hypothesis.seed(f"tangents {dtype} {number}")
    @hypothesis.settings(
        max_examples=size, phases=[hypothesis.Phase.generate, hypothesis.Phase.target], database=None, deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(drawn(dtype))
    def check(moving: Moving) -> None:
        every = quotients(moving)
        shares = {name: share for name, share in every.items() if not math.isnan(share)}
        largest, unbounded = max(shares.values()), len(every) - len(shares)
        hypothesis.target(min(largest, 2.0))
        counts = {"examples": 1, "outside": int(largest > 1), "unbounded": unbounded}
        add(row, {**counts, "worst": repr(moving), **shares})

    check()
    return row


def empty_row() -> Record:
    """Return counts and quotients of no example."""
    return dict.fromkeys(COUNTS, 0) | dict.fromkeys(PROPERTIES, 0.0) | {"worst": ""}


def add(total: Record, row: Record) -> None:
    """Add a row's counts to a total, and take its larger quotients and their example."""
    if max(float(row.get(name) or 0) for name in PROPERTIES) > max(float(total[name]) for name in PROPERTIES):
        total["worst"] = row["worst"]
    for name in COUNTS:
        total[name] = int(total[name]) + row[name]
    for name in PROPERTIES:
        total[name] = max(float(total[name]), float(row.get(name) or 0))


def run(config: Config, path: Path) -> Iterator[Record]:
    """Draw batches, dtypes in turn, until the time is over; add each to the ledger, and yield its row."""
    rows = read_csv(path) if path.exists() else []
    ledger: dict[str, Record] = {row["dtype"]: {n: x for n, x in row.items() if n not in machine()} for row in rows}
    start = time.monotonic()
    while True:
        for dtype in config.dtypes:
            if time.monotonic() - start > config.seconds:
                return
            total = ledger.setdefault(dtype, {"dtype": dtype, **empty_row(), "batches": 0})
            add(total, draw(dtype, int(total["batches"]), config.size))
            total["batches"] = int(total["batches"]) + 1
            write_csv(path, [total], ("dtype",))
            yield total


def table(rows: list[Record]) -> Table:
    """Tabulate the ledger by dtype."""
    shown = Table("dtype", *COUNTS, *PROPERTIES)
    for row in rows:
        shown.add_row(*(str(row[name]) for name in ("dtype", *COUNTS)),
                      *(f"{float(row[name]):.3f}" for name in PROPERTIES))  # fmt: skip
    return shown


def main() -> None:
    config, results = parse_config(Config, __doc__)
    path = results / "tangent_sweep.csv"
    with one_thread():
        rows = {row["dtype"]: row for row in run(config, path)}
    Console(width=None if sys.stdout.isatty() else 120).print(table(list(rows.values())))
    if any(row["outside"] for row in rows.values()):
        sys.exit("\n".join(f"{dtype}: {row['worst']}" for dtype, row in rows.items() if row["outside"]))


if __name__ == "__main__":
    main()
