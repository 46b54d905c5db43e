"""Training of the language model on source text; an interruption loses only the last few steps.

A run is its configuration, its state and its attention. `Training.continued` continues from the newest checkpoint of an
equal configuration. The tokens of a step depend only on the seed and the step's number, so that an interrupted run ends
with bitwise the same weights as an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cuflash
import model
import numpy as np
from cuflash import masks, patterns
from harness import atomic_path

CHECKPOINTS = Path(__file__).parents[2] / "build" / "checkpoints"  # ignored by git
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # other characters become "?"
HELD_OUT = 0.1  # fraction of the text, at its end, that is not used for training


def library_text(most: int) -> np.ndarray:
    """Return the first characters of Python's standard library, modules sorted by name, as indices into `ALPHABET`."""
    parts, length = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if length >= most:
            break
        parts.append(path.read_bytes())
        length += len(parts[-1])
    table = np.full(256, ALPHABET.index("?"), np.uint8)
    table[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    return table[np.frombuffer(b"".join(parts)[:most], np.uint8)].astype(np.int32)


# Attentions


def naive(q: Any, k: Any, v: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Compute causal attention by array formulas; the weight matrix is stored for the backward pass."""
    xp, scale = model.xp_of(q), q.dtype.type(q.shape[-1] ** -0.5)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat(group, axis=1) for x in (k, v))
    p = q @ k.swapaxes(-1, -2)
    p *= scale
    p += xp.where(xp.tri(*p.shape[-2:], dtype=bool), p.dtype.type(0), p.dtype.type(-np.inf))
    p -= p.max(axis=-1, keepdims=True)
    xp.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    o = p @ v

    def vjp(do: Any) -> tuple[Any, Any, Any]:
        ds = do @ v.swapaxes(-1, -2)
        ds -= (do * o).sum(axis=-1, keepdims=True)
        ds *= p
        ds *= scale
        dk, dv = (
            x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2)
            for x in (ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do)
        )
        return ds @ k, dk, dv

    return o, vjp


def block_indices(seqlen: int, block: int) -> dict[str, cuflash.BlockIndex]:
    """Return the causal block-sparse patterns of one length by name."""
    masks_by_name = {
        "sink_local": patterns.sink_local(1, (1, 0)).on_blocks(block),
        "butterfly": patterns.butterfly(seqlen, block=block),
    }
    return {
        name: cuflash.BlockIndex.from_mask(masks.Causal() & mask, seqlen, seqlen, block)
        for name, mask in masks_by_name.items()
    }


def density(index: cuflash.BlockIndex) -> float:
    """Return the fraction of causal attention's elements that an index keeps."""
    seqlen = index.seqlen_q
    return index.report().element_density * seqlen**2 / (seqlen * (seqlen + 1) / 2)


def wrong_key(q: Any, k: Any, v: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Compute exact attention with a planted fault: every sixteenth key is replaced by its predecessor."""
    k = k.copy()
    k[:, :, 16::16] = k[:, :, 15:-1:16]
    return model.exact(q, k, v)


def attentions(indices: dict[str, cuflash.BlockIndex]) -> dict[str, model.Attend]:
    """Return attention functions by name; the block list of each index is built once."""
    return {
        "naive": naive,
        "exact": model.exact,
        **{name: functools.partial(cuflash.attention_vjp, mask=index) for name, index in indices.items()},
        "wrong_key": wrong_key,
    }


# Steps


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything except the text that determines a run: equal recipes give equal losses on one machine."""

    attention: str
    model: model.Config
    batch: int
    steps: int
    block: int
    seed: int = 0
    rate: float = 3e-3
    dtype: str = "float32"  # dtype of activations; weights are always float32
    device: str = "numpy"

    @property
    def loss_scale(self) -> float:
        return 1024.0 if self.dtype == "float16" else 1.0

    @property
    def key(self) -> str:
        """A name that is different for every recipe."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return f"{self.attention}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@functools.lru_cache(maxsize=1)
def drawn(config: model.Config, seed: int) -> np.ndarray:
    """Return the initial weights of a run; runs with equal seeds share them, whatever their attention."""
    return np.concatenate([x.ravel() for x in model.parameters(config, seed).values()])


@dataclass
class Training:
    """A run: its weights in one vector, Adam's running means and squares, and the loss and time of each step."""

    recipe: Recipe
    flat: Any
    means: Any
    squares: Any
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def new(cls, recipe: Recipe, xp: Any) -> Training:
        """Return a new run on NumPy or CuPy arrays."""
        flat = xp.array(drawn(recipe.model, recipe.seed))
        return cls(recipe, flat, xp.zeros_like(flat), xp.zeros_like(flat))

    @classmethod
    def continued(cls, recipe: Recipe, xp: Any, folder: Path) -> Training:
        """Return the run stored in a checkpoint, or a new run if there is no checkpoint."""
        path = folder / f"{recipe.key}.npz"
        if not path.exists():
            return cls.new(recipe, xp)
        with np.load(path) as file:
            arrays = {part: xp.asarray(file[part]) for part in ("flat", "means", "squares")}
            return cls(recipe, **arrays, losses=file["losses"].tolist(), seconds=file["seconds"].tolist())

    def save(self, folder: Path) -> None:
        """Write the checkpoint atomically."""
        parts = {part: getattr(self, part) for part in ("flat", "means", "squares")}
        arrays = {part: x if isinstance(x, np.ndarray) else x.get() for part, x in parts.items()}
        with atomic_path(folder / f"{self.recipe.key}.npz") as partial, partial.open("wb") as file:
            np.savez(file, losses=np.array(self.losses), seconds=np.array(self.seconds), **arrays)

    def forget(self, folder: Path) -> None:
        """Remove the checkpoint of a finished run, so that the next call starts from the beginning."""
        (folder / f"{self.recipe.key}.npz").unlink(missing_ok=True)

    @property
    def weights(self) -> model.Parameters:
        """The weights by name, in the dtype of the activations."""
        return model.views(self.flat.astype(self.recipe.dtype, copy=False), model.shapes_of(self.recipe.model))

    def step(self, text: Any, attend: model.Attend) -> float:
        """Run one step of Adam on random pieces of the text, and return its loss."""
        recipe, number, start = self.recipe, len(self.losses) + 1, time.perf_counter()
        weights, tokens = self.weights, pieces(text, recipe, number)
        loss, gradients = model.loss_and_gradients(weights, tokens, recipe.model, attend, recipe.loss_scale)
        flat = model.xp_of(text).concatenate([gradients[name].ravel() for name in weights])
        wide = flat.astype(np.float32, copy=False) / recipe.loss_scale
        rate = recipe.rate * min(1, number / 20) * (1 - (number - 1) / recipe.steps)
        parts = ({"": x} for x in (self.flat, self.means, self.squares, wide))
        model.adam(*parts, number, rate)
        self.losses.append(loss)
        self.seconds.append(time.perf_counter() - start)
        return loss

    def steps(self, text: Any, attend: model.Attend, folder: Path, *, every: int) -> Iterator[float]:
        """Yield the losses of all remaining steps; write a checkpoint every `every` steps and at the end."""
        while len(self.losses) < self.recipe.steps:
            loss = self.step(text, attend)
            if len(self.losses) % every == 0 or len(self.losses) == self.recipe.steps:
                self.save(folder)
            yield loss

    def held_out_loss(self, text: Any, attend: model.Attend, count: int = 8) -> float:
        """Return the mean loss on text that was not used for training."""
        xp, length = model.xp_of(text), self.recipe.model.context + 1
        first = trained_on(text)
        starts = np.linspace(first, len(text) - length, count).astype(int)
        losses = [
            model.loss_and_gradients(
                self.weights, text[xp.asarray(start + np.arange(length))][None], self.recipe.model, attend
            )[0]
            for start in starts
        ]
        return float(np.mean(losses))


def trained_on(text: Any) -> int:
    """Return the number of characters, counted from the start of the text, from which steps draw."""
    return int(len(text) * (1 - HELD_OUT))


def pieces(text: Any, recipe: Recipe, step: int) -> Any:
    """Return the tokens of a step, [batch, context + 1]."""
    xp, length = model.xp_of(text), recipe.model.context + 1
    starts = np.random.default_rng((recipe.seed, step)).integers(0, trained_on(text) - length, recipe.batch)
    return text[xp.asarray(starts[:, None] + np.arange(length))]
