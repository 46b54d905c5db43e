"""How much accuracy does FP8 cost, and how much of it do block scales and rotations recover?

    python -m experiments fp8_error                                    # minutes
    python -m experiments fp8_error --seqlens 512
    python -m experiments fp8_error --gpu                              # the kernel, on a GPU of compute capability 9.0
    python -m experiments fp8_error --sim --queries 256                # the kernel on the simulator

Attention of q, k and v that are quantized to e4m3 in several ways is compared with the specification in float64 on the
original float16 operands; errors are root mean squares over o. The operands have the distribution of FlashAttention-3
(arXiv 2407.08608, section 4.3), N(0, 1) + N(0, 100) Bernoulli(0.001), or are N(0, 1). The cpu executor rounds nothing
else to FP8. Kernels also round the weights, and tensor cores truncate sums; their errors are in separate files.
`queries` is the number of computed queries per head, 0 for all. `share` is the largest error divided by its bound (the
sum of quantization_bound and error_bound) for the first `bounded` queries of the first head.

Expect: with outliers, rotating q and k halves the error of one scale per tensor; without outliers, all methods are
equal.
Found:  with outliers, a rotation reduces the error of one scale per tensor by a factor of 2.0 at head_dim 128 and 2048
rows, and of 2.7 at 8192 rows; at head_dim 64 by 1.9 and 2.2. The more scores there are, the more weight goes to keys
whose outliers coincide with a query's. The table is in docs/fp8.md.

Cost: Minutes on two cores; --gpu half a minute of a GPU, and the same time on the host for the exact results.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from cuflash import reference
from harness import Record, gpu_versions, main, track, why_no_gpu
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
    gpu: bool = False
    sim: bool = False
    queries: int = 0

    @property
    def executor(self) -> str:
        """The executor that computes the results."""
        return "gpu" if self.gpu else "sim" if self.sim else "cpu"

    def __post_init__(self) -> None:
        if self.gpu and self.sim:
            raise ValueError("gpu and sim are two runs: choose one of them")
        if any(dim & (dim - 1) or dim > (256 if self.executor == "cpu" else 128) for dim in self.head_dims):
            raise ValueError("head_dims must be powers of two, at most 256, and at most 128 for kernels")
        if min(self.heads, self.bounded, *self.seqlens, *self.head_dims) < 1:
            raise ValueError("head_dims, heads, seqlens and bounded must be positive")


def draw(rng: np.random.Generator, shape: tuple[int, ...], distribution: str) -> Any:
    """Draw float16 operands from a distribution."""
    x = rng.standard_normal(shape)
    if distribution == "outliers":
        x += 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001)
    return x.astype(np.float16)


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def on_host(x: Any) -> Any:
    """Return a result as a NumPy array of float64."""
    return (x if isinstance(x, np.ndarray) else x.get()).astype(np.float64)


def quantized(x: tuple[Any, ...], per: str, rotation: cuflash.Rotation | None) -> list[cuflash.Quantized]:
    """Quantize q, k and v to FP8 on the device that holds them."""
    return [cuflash.quantize(each, per=per, rotate=by) for each, by in zip(x, (rotation, rotation, None))]


def share_of_bound(x: tuple[Any, ...], per: str, rotation: Any, send: Any, exact: Any, config: Config) -> float:
    """Return the largest ratio of an error to its bound, for the first queries of the first head."""
    few = x[0][:1, : config.bounded], x[1][:1], x[2][:1]
    few8 = quantized(few, per, rotation)
    product_dtype = None if config.executor == "cpu" else ml_dtypes.float8_e4m3fn
    bound = cuflash.study.quantization_bound(*few, *few8).o + cuflash.error_bound(*few8, product_dtype=product_dtype).o
    operands = quantized(tuple(map(send, few)), per, rotation)
    o = on_host(cuflash.attention(*operands, executor=config.executor))
    return float((np.abs(o - exact[:1, : config.bounded]) / bound).max())


def run(config: Config) -> Iterator[Record]:
    """Yield one record per distribution, head_dim, length and method."""
    send: Any = np.asarray
    if config.gpu:
        if reason := why_no_gpu():
            raise SystemExit(f"fp8_error --gpu runs on a GPU: {reason}")
        import cupy

        send = cupy.asarray
    cases = list(itertools.product(DISTRIBUTIONS, config.head_dims, config.seqlens))
    for distribution, head_dim, seqlen in track(cases, "operands"):
        rng = np.random.default_rng(config.seed)
        q, k, v = (draw(rng, (config.heads, seqlen, head_dim), distribution) for _ in range(3))
        q = q[:, : config.queries or None]
        exact = reference.attention(*(x.astype(np.float64) for x in (q, k, v)))[0]
        row = {"distribution": distribution, "head_dim": head_dim, "seqlen": seqlen, "heads": config.heads}
        row |= {"executor": config.executor, "queries": q.shape[1], **(gpu_versions() if config.gpu else {})}
        operands = send(q), send(k), send(v)
        plain = rms(on_host(cuflash.attention(*operands, executor=config.executor)) - exact)
        yield row | {"per": "", "rotated": "", "rmse": plain, "ratio": None, "share": None}
        worst = None
        for per, rotates in itertools.product(PARTS, (False, True)):
            rotation = cuflash.Rotation(head_dim) if rotates else None
            o = on_host(cuflash.attention(*quantized(operands, per, rotation), executor=config.executor))
            error = rms(o - exact)
            worst = error if worst is None else worst
            share = share_of_bound((q, k, v), per, rotation, send, exact, config)
            measurements = {"per": per, "rotated": rotates, "rmse": error, "ratio": worst / error, "share": share}
            yield row | measurements


def table(records: list[Record]) -> Table:
    """Tabulate the errors, one column per distribution, head_dim and length."""
    result = Table(title="root mean square error of o; ratio to one scale for a tensor without a rotation")
    result.add_column("method")
    columns = list(dict.fromkeys((row["distribution"], row["head_dim"], row["seqlen"]) for row in records))
    for distribution, head_dim, seqlen in columns:
        result.add_column(f"{distribution}, {head_dim} columns, {seqlen} rows", justify="right")
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
        result.add_row(name, *cells)
    return result


# Columns that distinguish the rows of a GPU run.
ROW = ("gpu", "distribution", "head_dim", "seqlen", "per", "rotated")

if __name__ == "__main__":
    main(
        Config, run, table, replacing=lambda config: ROW if config.gpu else (),
        name=lambda config: "fp8_error" + "_gpu" * config.gpu + "_sim" * config.sim,
    )  # fmt: skip
