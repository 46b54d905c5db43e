"""What do 8 bits cost, and how much of it do blocks and rotations give back?

    python -m experiments fp8_error                    # minutes
    python -m experiments fp8_error --seqlens 512

Attention of q, k and v quantised to e4m3 in every way, on the cpu executor, against the specification in float64 on the
operands as they were drawn, float16: root mean squares of the error of o. The operands are those of FlashAttention-3
(arXiv 2407.08608, section 4.3), N(0, 1) + N(0, 100) Bernoulli(0.001), and plain N(0, 1). The cpu executor rounds
nothing else to 8 bits: the weights, which kernels round too, are float32 here. `share` is the largest error over the
bound, quantization_bound and error_bound together, on the first head and as many queries as `bounded`.

Expect: with outliers a rotation of q and k halves the error of one scale for a tensor; without outliers all are alike.
Found:  so it is, at 128 columns, and at 64 in part, and more in long sequences: the more scores there are, the more
        weight goes to keys whose outliers meet a query's. The table is in docs/fp8.md.

Cost: Minutes on two cores.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cuflash
import numpy as np
from cuflash import reference
from harness import Record, main, track
from rich.table import Table

DISTRIBUTIONS = ("normal", "outliers")
PARTS = ("tensor", "head", "block")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration; the defaults are those of the published run."""

    head_dims: tuple[int, ...] = (64, 128)
    heads: int = 4
    seqlens: tuple[int, ...] = (2048, 8192)
    bounded: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.heads, self.bounded, *self.seqlens, *self.head_dims) < 1:
            raise ValueError("head_dims, heads, seqlens and bounded must be positive")


def draw(rng: np.random.Generator, shape: tuple[int, ...], distribution: str) -> Any:
    """Operands of a distribution, in float16."""
    x = rng.standard_normal(shape)
    if distribution == "outliers":
        x += 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001)
    return x.astype(np.float16)


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def share_of_bound(q: Any, k: Any, v: Any, x8: tuple[Any, Any, Any], exact: Any, rows: int) -> float:
    """The largest error of the first head's first queries over its bound."""
    few = q[:1, :rows], k[:1], v[:1]
    few8 = [cuflash.quantize(x, per=each.per, rotate=each.rotation) for x, each in zip(few, x8)]
    bound = cuflash.quantization_bound(*few, *few8).o + cuflash.error_bound(*few8).o
    return float((np.abs(cuflash.attention(*few8) - exact[:1, :rows]) / bound).max())


def run(config: Config) -> Iterator[Record]:
    """One record for each distribution, head_dim, length and method."""
    cases = list(itertools.product(DISTRIBUTIONS, config.head_dims, config.seqlens))
    for distribution, head_dim, seqlen in track(cases, "operands"):
        rng = np.random.default_rng(config.seed)
        q, k, v = (draw(rng, (config.heads, seqlen, head_dim), distribution) for _ in range(3))
        exact = reference.attention(*(x.astype(np.float64) for x in (q, k, v)))[0]
        row = {"distribution": distribution, "head_dim": head_dim, "seqlen": seqlen, "heads": config.heads}
        plain = rms(cuflash.attention(q, k, v).astype(np.float64) - exact)
        yield row | {"per": "", "rotated": "", "rmse": plain, "ratio": None, "share": None}
        worst = None
        for per, rotates in itertools.product(PARTS, (False, True)):
            rotation = cuflash.Rotation(head_dim) if rotates else None
            x8 = (
                cuflash.quantize(q, per=per, rotate=rotation),
                cuflash.quantize(k, per=per, rotate=rotation),
                cuflash.quantize(v, per=per),
            )
            error = rms(cuflash.attention(*x8) - exact)
            worst = error if worst is None else worst
            share = share_of_bound(q, k, v, x8, exact, config.bounded)
            found = {"per": per, "rotated": rotates, "rmse": error, "ratio": worst / error, "share": share}
            yield row | found


def table(records: list[Record]) -> Table:
    """The errors, a column for each distribution, head_dim and length."""
    made = Table(title="root mean square error of o; ratio to one scale for a tensor without a rotation")
    made.add_column("method")
    columns = list(dict.fromkeys((row["distribution"], row["head_dim"], row["seqlen"]) for row in records))
    for distribution, head_dim, seqlen in columns:
        made.add_column(f"{distribution}, {head_dim} columns, {seqlen} rows", justify="right")
    for per, rotated in dict.fromkeys((row["per"], row["rotated"]) for row in records):
        cells = []
        for column in columns:
            (row,) = (
                row
                for row in records
                if (row["distribution"], row["head_dim"], row["seqlen"]) == column
                and (row["per"], row["rotated"]) == (per, rotated)
            )
            ratio = "" if row["ratio"] is None else f"  {row['ratio']:.2f}"
            cells.append(f"{row['rmse']:.2e}{ratio}")
        name = f"a scale for each {per}" + ", rotated" * bool(rotated) if per else "float16"
        made.add_row(name, *cells)
    return made


if __name__ == "__main__":
    main(Config, run, table)
