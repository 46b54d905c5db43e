"""What do q, k and v of a trained causal language model look like? Saves some of them for the experiments.

    python -m experiments capture_language_model            # on the host, for hours
    python -m experiments capture_language_model --gpu      # on a GPU, in a minute

Trains the model of `train_language_model` for longer, with exact attention, on the source of Python's standard library.
Then writes language_activations.npz: q, k and v of one layer on text that was not used for training, float16, before
scaling. k and v are repeated for the query heads that share them, so all three have the same number of heads. The
archive goes to build/results, or with --publish to experiments/data. An interrupted training continues from its
checkpoint in build/checkpoints.

Found:  the archive's provenance and data/README.md have the results of the training.

Cost: A minute of a GPU, hours on two cores.
"""

import datetime
import json
import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import model
import numpy as np
from command_line import check_writable
from harness import archive_folder, machine, parse_config, track, why_no_gpu, write_archive
from train_language_model import Config as Sizes
from training import CHECKPOINTS, Recipe, Training, library_text, trained_on


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of the training, and the number of the saved layer, from 1 on; the archive used --gpu."""

    gpu: bool = False
    context: int = 512
    batch: int = 16
    steps: int = 2000
    seqlen: int = 512
    layer: int = 3
    characters: int = 8_000_000
    save_every: int = 200
    checkpoints: Path = CHECKPOINTS

    def __post_init__(self) -> None:
        if not 1 <= self.seqlen <= self.context or self.context % 64:
            raise ValueError("seqlen must lie in 1..context, and context be a multiple of 64")
        if self.layer > self.recipe.model.num_layers:
            raise ValueError(f"layer must be one of {self.recipe.model.num_layers}; got {self.layer}")
        if min(self.batch, self.steps, self.save_every) < 1 or self.characters < 20 * self.context:
            raise ValueError("batch, steps and save_every must be positive, characters 20 times the context")

    @property
    def recipe(self) -> Recipe:
        """The configuration of the GPU run of `train_language_model`, with exact attention."""
        base = Sizes(gpu=True, gpu_context=self.context, gpu_batch=self.batch, gpu_steps=self.steps).recipe
        return replace(base, attention="exact", device="cupy" if self.gpu else "numpy")


def capture(config: Config) -> dict[str, Any]:
    """Train, and record the arguments of the layer's attention calls."""
    xp: Any = np
    if config.gpu:
        if reason := why_no_gpu():
            sys.exit(f"capture_language_model --gpu trains on a GPU: {reason}")
        import cupy as xp
    text = xp.asarray(library_text(config.characters))
    run = Training.continued(config.recipe, xp, config.checkpoints)
    left = range(config.steps - len(run.losses))
    for _ in zip(track(left, "steps"), run.steps(text, model.exact, config.checkpoints, every=config.save_every)):
        pass
    calls = []

    def recorded(q: Any, k: Any, v: Any) -> Any:
        calls.append((q, k, v))
        return model.exact(q, k, v)

    first = trained_on(text)
    model.forward(run.weights, text[None, first : first + config.seqlen], run.recipe.model, attend=recorded)
    q, k, v = (x[0] if xp is np else x[0].get() for x in calls[config.layer - 1])
    k, v = (x.repeat(len(q) // len(k), axis=0) for x in (k, v))
    held_out = run.held_out_loss(text, model.exact)
    provenance = {
        "model": f"{run.recipe.model}",
        "text": f"Python {platform.python_version()}, standard library, modules by name, PSF License 2",
        "steps": config.steps, "batch": config.batch, "context": config.context, "layer": config.layer,
        "last_loss": round(float(np.mean(run.losses[-100:])), 4), "held_out_loss": round(held_out, 4),
        "dtype": "float16, rounded from float32", "commit": machine()["commit"], "gpu": machine()["gpu"],
        "date": datetime.date.today().isoformat(),
        "largest_value": round(max(float(np.abs(x).max()) for x in (q, k, v)), 3),
    }  # fmt: skip
    half = {name: x.astype(np.float16) for name, x in zip("qkv", (q, k, v))}
    run.forget(config.checkpoints)
    return half | {"provenance": np.array(json.dumps(provenance, indent=1))}


def main() -> None:
    """Write the archive that the command line asks for."""
    chosen, results = parse_config(Config, __doc__)
    folder = archive_folder(results)
    check_writable(folder)
    write_archive(folder / "language_activations.npz", capture(chosen))


if __name__ == "__main__":
    main()
