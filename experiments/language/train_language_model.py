"""Does a model that trains with tiled attention learn the same as one with naive attention, and how fast?

    python -m experiments train_language_model           # a small model on the host, in under a minute
    python -m experiments train_language_model --gpu     # a larger one on a GPU
    python -m experiments train_language_model --long    # GPT-2 small's layers on a GPU at 1k, 4k and 16k tokens

The model of model.py learns the source of Python's standard library, character by character. Runs with the same seed
start with the same weights and see the same text; only attention differs. `naive` is array formulas that store the
weight matrix, `exact` is cuflash, `sink_local` and `butterfly` are block-sparse patterns, and `wrong_key` is exact
attention with a planted fault: every sixteenth key is that of the previous token. Over the first `compared_steps`
steps, each loss may differ from the naive loss by a relative sqrt(eps), so that half of the digits agree. `wrong_key`
ends at the first step that violates this, which shows that the bound detects such a fault. Tokens per second are those
of the median step; on the host BLAS has one thread. Peak memory is the memory of the gradients of one step in addition
to the weights: the maximum of NumPy's arrays, or the bytes that CuPy's pool took from the device. The longest context
is the largest power of two for which the gradients of one sequence fit in `budget_mib`. The held-out loss is measured
on text that was not used for training, in nats per character.

`--long` times whole steps, gradients and Adam, of 12 layers of width 768 with 12 heads of 64 in float16, with a
vocabulary of characters. For comparison: in FlashAttention's paper (arXiv 2205.14135, table 2), GPT-2 small on 8 A100
at 1k tokens trains 3.5 times as fast as Huggingface's implementation and 1.7 times as fast as Megatron's, and at 4k
tokens (table 4) 1.3 times as fast as Megatron's at 1k. The table shows the speed-up of this model over naive attention
in CuPy next to the first of these numbers.

An interrupted run continues from its checkpoints in build/checkpoints; a finished run removes them.

Found:  over 200 steps on the host, the relative difference of losses with exact and naive attention is at most 0.012 %,
a third of the bound, and the wrong key is detected at the second step. Patterns with 29 % and 32 % of the elements do
not increase the loss in so short a training: their held-out losses are 2.70 and 2.72, and that of naive attention is
2.73. On an H100, steps of GPT-2 small's layers are 4.7 times as fast with exact attention as with naive attention at
1024 tokens, and 13.9 times at 4096.

Cost: Under a minute on two cores; --gpu and --long two minutes of a GPU each.
"""

import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import model
import numpy as np
from device_memory import peak_on_device
from harness import Record, check_names, gpu_versions, main, one_thread, track, why_no_gpu
from rich.console import Group
from rich.table import Table
from training import ALPHABET, CHECKPOINTS, Recipe, Training, attentions, block_indices, density, library_text, pieces

NAMES = ("naive", "exact", "sink_local", "butterfly", "wrong_key")
PUBLISHED_SPEEDUP = {1024: 3.5}  # FlashAttention, table 2: GPT-2 small relative to Huggingface


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the run on the host; fields that start with gpu or long belong to the other two runs."""

    gpu: bool = False
    long: bool = False
    names: tuple[str, ...] = NAMES
    context: int = 256
    batch: int = 2
    steps: int = 200
    compared_steps: int = 200
    block: int = 16
    seed: int = 0
    characters: int = 2_000_000
    budget_mib: int = 32
    save_every: int = 50
    checkpoints: Path = CHECKPOINTS
    gpu_context: int = 1024
    gpu_batch: int = 16
    gpu_steps: int = 600
    gpu_block: int = 64
    gpu_budget_mib: int = 8192
    long_contexts: tuple[int, ...] = (1024, 4096, 16384)
    long_tokens: int = 16384
    long_steps: int = 8
    long_layers: int = 12

    def __post_init__(self) -> None:
        check_names(self, {"names": NAMES})
        if self.gpu and self.long:
            raise ValueError("gpu and long are two runs: choose one of them")
        if "naive" not in self.names or len(set(self.names)) < len(self.names):
            raise ValueError("names must hold naive, which the others are compared with, and none twice")
        for context, block in ((self.context, self.block), (self.gpu_context, self.gpu_block)):
            if block < 16 or context % block:
                raise ValueError(f"block must be at least 16 and divide context; got {block} and {context}")
        counts = (self.batch, self.steps, self.budget_mib, self.save_every, self.gpu_batch, self.gpu_steps)
        if min(*counts, self.gpu_budget_mib, self.long_steps, self.long_layers, *self.long_contexts) < 1:
            raise ValueError("counts, contexts and budgets must be positive")
        longest = max(self.long_contexts) if self.long else self.gpu_context if self.gpu else self.context
        if longest > self.characters // 20:
            raise ValueError(f"characters must be at least 20 times the context; got {self.characters}, {longest}")
        if any(self.long_tokens % context or context % 128 for context in self.long_contexts):
            raise ValueError("long_contexts must be multiples of 128 that divide long_tokens")

    @property
    def recipe(self) -> Recipe:
        """The configuration of the run with naive attention."""
        if self.gpu:
            sizes = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "width": 128}
            sizes |= {"context": self.gpu_context}
            counts = {"batch": self.gpu_batch, "steps": self.gpu_steps, "block": self.gpu_block, "device": "cupy"}
        else:
            sizes = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "width": 64}
            sizes |= {"context": self.context}
            counts = {"batch": self.batch, "steps": self.steps, "block": self.block}
        shape = model.Config(vocabulary=len(ALPHABET), **sizes)
        return Recipe(attention="naive", model=shape, seed=self.seed, **counts)


# Memory


def peak_bytes(xp: Any, call: Callable[[], object], limit: int = 0) -> int | None:
    """Return the peak memory of a call in bytes, or None if it exceeds a nonzero limit."""
    if xp is np:
        tracemalloc.start()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak if not limit or peak <= limit else None
    try:
        return peak_on_device(call, limit)[1]
    except MemoryError:  # includes CuPy's OutOfMemoryError
        return None


def gradients_of(recipe: Recipe, text: Any, weights: model.Parameters, attend: model.Attend) -> Callable[[], object]:
    """Return a function that computes the gradients of a recipe's first step."""
    tokens = pieces(text, recipe, 1)
    return partial(model.loss_and_gradients, weights, tokens, recipe.model, attend, recipe.loss_scale)


def longest_context(xp: Any, recipe: Recipe, name: str, text: Any, budget: int) -> int:
    """Return the largest power of two for which the gradients of one sequence fit the budget; 0 if none does."""
    fitting, context = 0, 2 * recipe.block
    while context < len(text) // 20:
        longer = resized(recipe, context, batch=1)
        weights = {x: xp.asarray(array, recipe.dtype) for x, array in model.parameters(longer.model).items()}
        attend = attentions(block_indices(context, recipe.block))[name]
        if peak_bytes(xp, gradients_of(longer, text, weights, attend), budget) is None:
            break
        fitting, context = context, 2 * context
    return fitting


def resized(recipe: Recipe, context: int, **changes: Any) -> Recipe:
    """Return the recipe with another context length."""
    return replace(recipe, model=replace(recipe.model, context=context), **changes)


# Runs


def run_training(config: Config, xp: Any) -> Iterator[Record]:
    """Yield a row for each step and attention, and a row for each attention with its costs and results."""
    base, text = config.recipe, xp.asarray(library_text(config.characters))
    indices = block_indices(base.model.context, base.block)
    ways = attentions(indices)
    bound = float(np.finfo(base.dtype).eps ** 0.5)
    budget = (config.gpu_budget_mib if config.gpu else config.budget_mib) << 20
    naive_losses, runs = list[float](), list[Training]()
    for name in sorted(config.names, key=NAMES.index):
        run = Training.continued(replace(base, attention=name), xp, config.checkpoints)
        runs.append(run)
        left = range(base.steps - len(run.losses))
        for _, loss in zip(track(left, name), run.steps(text, ways[name], config.checkpoints, every=config.save_every)):
            if name == "wrong_key" and abs(loss / naive_losses[len(run.losses) - 1] - 1) > bound:
                break
        naive_losses = run.losses if name == "naive" else naive_losses
        compared = zip(run.losses[: config.compared_steps], naive_losses)
        gap = max(abs(loss / right - 1) for loss, right in compared)
        shape = {"attention": name, "context": base.model.context, "batch": base.batch, "dtype": base.dtype}
        for step in range(0, len(run.losses), max(1, base.steps // 40)):
            yield {"part": "step", **shape, "step": step + 1, "loss": run.losses[step]}
        row = {"part": "run", **shape, "step": len(run.losses), "loss": float(np.mean(run.losses[-10:]))}
        row |= {"gap": gap, "bound": bound, "density": density(indices[name]) if name in indices else 1.0}
        if name != "wrong_key":
            tokens = base.batch * base.model.context
            peak = peak_bytes(xp, gradients_of(base, text, run.weights, ways[name]))
            row |= {
                "held_out_loss": run.held_out_loss(text, ways[name]),
                "tokens_per_s": tokens / float(np.median(run.seconds)), "peak_mib": (peak or 0) / 2**20,
                "longest_context": longest_context(xp, base, name, text, budget), "budget_mib": budget >> 20,
            }  # fmt: skip
        yield row
    for run in runs:
        run.forget(config.checkpoints)


def run_long(config: Config, xp: Any) -> Iterator[Record]:
    """Yield a row for each context and attention: seconds of a step of GPT-2 small's layers, and its memory."""
    text = xp.asarray(library_text(config.characters))
    for context in config.long_contexts:
        shape = model.Config(
            vocabulary=len(ALPHABET), context=context, num_layers=config.long_layers, num_heads=12, num_kv_heads=12,
            head_dim=64, width=768,
        )  # fmt: skip
        indices, naive_s = block_indices(context, 128), None
        for name, attend in track(list(attentions(indices).items()), f"{context} tokens"):
            if name == "wrong_key" or name not in config.names:
                continue
            batch = config.long_tokens // context
            recipe = Recipe(
                attention=name, model=shape, batch=batch, steps=config.long_steps, block=128, rate=3e-4,
                dtype="float16", device="cupy",
            )  # fmt: skip
            row: Record = {"part": "long", "attention": name, "context": context, "batch": batch, "dtype": "float16"}
            row |= {"density": density(indices[name]) if name in indices else 1.0}
            run, memory = Training.new(recipe, xp), xp.get_default_memory_pool()
            memory.free_all_blocks()
            try:
                peak = peak_bytes(xp, gradients_of(recipe, text, run.weights, attend))
                if peak is None:
                    yield row | {"note": "does not fit"}
                    continue
                seconds = float(np.median(list(timed_steps(run, text, attend, xp))[2:]))
            except MemoryError:  # includes CuPy's OutOfMemoryError
                yield row | {"note": "does not fit"}
                continue
            naive_s = seconds if name == "naive" else naive_s
            yield row | {
                "loss": run.losses[-1], "ms": 1e3 * seconds, "tokens_per_s": config.long_tokens / seconds,
                "speedup": None if naive_s is None else naive_s / seconds, "peak_mib": peak / 2**20,
                "published_speedup": PUBLISHED_SPEEDUP.get(context) if name == "exact" else None, "note": "",
            }  # fmt: skip


def timed_steps(run: Training, text: Any, attend: model.Attend, xp: Any) -> Iterator[float]:
    """Yield the seconds of each step, after waiting for the GPU."""
    for _ in range(run.recipe.steps):
        xp.cuda.Device().synchronize()
        start = time.perf_counter()
        run.step(text, attend)
        xp.cuda.Device().synchronize()
        yield time.perf_counter() - start


def run(config: Config) -> Iterator[Record]:
    """Run the host's part, or one of the parts for a GPU."""
    if not (config.gpu or config.long):
        with one_thread():
            yield from run_training(config, np)
        return
    if reason := why_no_gpu():
        sys.exit(f"train_language_model --{'gpu' if config.gpu else 'long'} trains on a GPU: {reason}")
    import cupy

    for row in (run_training if config.gpu else run_long)(config, cupy):
        yield row | gpu_versions()


# Tables and plots


def table(records: list[Record]) -> Group:
    """Return a line for each attention, or in a long run for each attention and context."""
    panels = []
    runs = [row for row in records if row["part"] == "run"]
    if runs:
        shown = Table(title=f"{runs[0]['context']} tokens, losses in nats a character; gap is to naive's losses")
        names = ("step", "loss", "held_out_loss", "gap", "bound", "density", "tokens_per_s", "peak_mib")
        for column in ("attention", *names, "longest_context"):
            shown.add_column(column.replace("_", " "), justify="left" if column == "attention" else "right")
        for row in runs:
            cells = (f"{row[name]:.4g}" if name in row else "" for name in names)
            shown.add_row(row["attention"], *cells, str(row.get("longest_context", "")))
        panels.append(shown)
    long = [row for row in records if row["part"] == "long"]
    if long:
        shown = Table(title="whole steps of 12 layers of width 768, float16")
        names = ("ms", "tokens_per_s", "speedup", "published_speedup", "peak_mib")
        for column in ("context", "batch", "attention", *names, "note"):
            shown.add_column(column.replace("_", " "), justify="left" if column == "attention" else "right")
        for row in long:
            cells = (f"{row[name]:.4g}" if row.get(name) is not None else "" for name in names)
            shown.add_row(str(row["context"]), str(row["batch"]), row["attention"], *cells, row["note"])
        panels.append(shown)
    return Group(*panels)


def plot(records: list[Record]) -> Any:
    """Plot losses over steps, or in a long run tokens per second and memory over the context."""
    steps = [row for row in records if row["part"] == "step"]
    measures = {"loss": "loss, nats a character"} if steps else {"tokens_per_s": "tokens/s", "peak_mib": "peak MiB"}
    figure, axes = plt.subplots(1, len(measures), figsize=(5.5 * len(measures), 3.8), squeeze=False)
    for ax, (measure, label) in zip(axes[0], measures.items()):
        drawn = steps or [row for row in records if row.get(measure)]
        for name in dict.fromkeys(row["attention"] for row in drawn):
            points = [(row["step" if steps else "context"], row[measure]) for row in drawn if row["attention"] == name]
            ax.plot(*zip(*points), {"naive": "-", "exact": "--"}.get(name, "-") if steps else "-o", label=name)
        if not steps:
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
        ax.set(xlabel="step" if steps else "tokens", ylabel=label)
        ax.legend(fontsize="small")
    figure.tight_layout()
    return figure


# Columns that distinguish the rows of --long.
ROW = ("gpu", "attention", "context", "dtype")

if __name__ == "__main__":
    main(
        Config, run, table, plot, replacing=lambda config: ROW if config.long else (),
        name=lambda config: "train_language_model" + "_gpu" * config.gpu + "_long" * config.long,
    )  # fmt: skip
