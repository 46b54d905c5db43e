"""How much slower than plain attention are score functions on the host?

    python -m experiments cpu_score_functions

Forward and backward passes of the cpu executor, with the library's score functions and without, are timed alternately.
`cpu_ms` is the minimum CPU time of a call over all repeats, summed over all threads. `of_plain` is the median over the
repeats of a call's CPU time divided by that of the plain call with the same mask and pass in the same repeat, since
other programs on the machine slow both.

Expect: the cost of a function is that of its own arithmetic: small for ALiBi and a temperature, a tanh for a softcap.
Found:  at 2048 tokens, relative to plain attention, the forward pass takes 1.46 times as long with a softcap, 1.10 with
ALiBi, and 0.87 with a temperature, with which weights are computed as natural exponentials; the backward pass takes
1.46, 1.04 and 1.05 times as long.

Cost: Minutes.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import truediv

import cuflash
import numpy as np
from cuflash import scores
from harness import Record, check_names, main
from rich.table import Table

SCORES = ("plain", "softcap", "alibi", "temperature")
MASKS = ("full", "causal")
PASSES = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and repeats; the defaults are the published run."""

    tokens: int = 2048
    heads: int = 4
    head_dim: int = 64
    repeats: int = 20
    scores: tuple[str, ...] = SCORES
    masks: tuple[str, ...] = MASKS

    def __post_init__(self) -> None:
        if min(self.tokens, self.heads, self.head_dim, self.repeats) < 1:
            raise ValueError("tokens, heads, head_dim and repeats must be positive")
        check_names(self, {"scores": SCORES, "masks": MASKS})
        if "plain" not in self.scores:
            raise ValueError("scores must name plain, which the others are compared with")


def score_of(name: str, heads: int) -> scores.Score | None:
    """Return the score function of this name; None for plain attention."""
    if name == "softcap":
        return scores.softcap(30.0)
    if name == "alibi":
        return scores.alibi(scores.alibi_slopes(heads))
    return scores.temperature(np.linspace(0.5, 1, heads, dtype=np.float32)) if name == "temperature" else None


def cpu_time(call: Callable[[], object]) -> tuple[float, object]:
    """Return the CPU time of all threads in milliseconds, and the result of the call."""
    begin = time.process_time()
    result = call()
    return 1e3 * (time.process_time() - begin), result


def run(config: Config) -> Iterator[Record]:
    """Yield one record per score, mask and pass."""
    shape = config.heads, config.tokens, config.head_dim
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal(shape, dtype=np.float32) for _ in range(4))
    spent: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(config.repeats):
        for mask in config.masks:
            for name in config.scores:
                score, causal = score_of(name, config.heads), mask == "causal"
                call = functools.partial(cuflash.attention_vjp, q, k, v, score=score, causal=causal)
                forward_ms, (_, vjp) = cpu_time(call)  # type: ignore[misc]
                backward_ms, _ = cpu_time(functools.partial(vjp, do))
                for which, ms in zip(PASSES, (forward_ms, backward_ms)):
                    spent.setdefault((name, mask, which), []).append(ms)
    sizes = {"tokens": config.tokens, "heads": config.heads, "head_dim": config.head_dim, "repeats": config.repeats}
    for (name, mask, which), each in spent.items():
        case = {"score": name, "mask": mask, "pass": which}
        ratios = map(truediv, each, spent["plain", mask, which])
        yield case | {"cpu_ms": min(each), "of_plain": statistics.median(ratios)} | sizes


def table(records: list[Record]) -> Table:
    """Tabulate one row per score, mask and pass."""
    shown = Table(title="CPU time of score functions on the host")
    for column in ("score", "mask", "pass", "cpu_ms", "of_plain"):
        shown.add_column(column, justify="right" if column in ("cpu_ms", "of_plain") else "left")
    for row in records:
        shown.add_row(row["score"], row["mask"], row["pass"], f"{row['cpu_ms']:.0f}", f"{row['of_plain']:.2f}")
    return shown


if __name__ == "__main__":
    main(Config, run, table)
