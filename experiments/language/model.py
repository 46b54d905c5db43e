"""A language model of characters, trained, then run with and without a KV cache.

    python -m experiments model

The model is a small decoder: embeddings of characters and positions, and layers of grouped-query attention and a
perceptron, each after an RMS norm. Gradients are written out; those of attention come from `cuflash.attention_vjp`. The
model is trained on the first page of Pride and Prejudice, within a minute on a CPU. `--xp cupy` does the same on a GPU.

Without a cache, each new character takes a pass over all earlier characters. With a cache, it takes a pass over only
itself, which reads the keys and values of the earlier characters. Both generate the same text.

Found:  both ways generate the same text, and the one with a cache generates more characters per second.

Cost: A minute on two cores.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cuflash
import numpy as np
from command_line import Parser

TEXT = Path(__file__).parents[1] / "data" / "text.txt"
Parameters = dict[str, Any]  # arrays by name
Pull = Callable[[Any], Any]  # maps the gradient of a result to the gradient of the argument
Attend = Callable[..., tuple[Any, Callable[[Any], Any]]]  # q, k, v -> o, and a function from dO to dQ, dK, dV


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the model; query head h reads key/value head h // (num_heads / num_kv_heads)."""

    vocabulary: int
    context: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    width: int = 64


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters: first weights [inputs, outputs], then gains."""
    width = config.width
    shapes: dict[str, tuple[int, ...]] = {
        "characters": (config.vocabulary, width), "positions": (config.context, width)
    }  # fmt: skip
    for layer in range(config.num_layers):
        shapes |= {
            f"{layer}.q": (width, config.num_heads * config.head_dim),
            f"{layer}.k": (width, config.num_kv_heads * config.head_dim),
            f"{layer}.v": (width, config.num_kv_heads * config.head_dim),
            f"{layer}.o": (config.num_heads * config.head_dim, width),
            f"{layer}.up": (width, 4 * width),
            f"{layer}.down": (4 * width, width),
        }
    shapes["logits"] = (width, config.vocabulary)
    norms = [f"{layer}.{name}" for layer in range(config.num_layers) for name in ("norm_attention", "norm_perceptron")]
    return shapes | {name: (width,) for name in (*norms, "norm")}


def parameters(config: Config, seed: int = 0, dtype: Any = np.float32) -> Parameters:
    """Return random weights, and gains equal to 1."""
    rng = np.random.default_rng(seed)

    def drawn(name: str, shape: tuple[int, ...]) -> Any:
        if len(shape) == 1:
            return np.ones(shape)
        scales = {"characters": 1.0, "positions": 0.3, "o": 0.3 / shape[0] ** 0.5, "down": 0.3 / shape[0] ** 0.5}
        return rng.standard_normal(shape) * scales.get(name.rpartition(".")[2], shape[0] ** -0.5)

    return {name: drawn(name, shape).astype(dtype) for name, shape in shapes_of(config).items()}


def views(flat: Any, shapes: dict[str, tuple[int, ...]]) -> Parameters:
    """Split a vector into views, one for each named parameter."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    ends = np.cumsum(sizes).tolist()
    parts = zip(shapes.items(), sizes, ends, strict=True)
    return {name: flat[end - size : end].reshape(shape) for (name, shape), size, end in parts}


# Layers: each returns its result and its pullback. The pullback stores gradients of parameters in a dict.


def linear(x: Any, weights: Parameters, name: str, gradients: Parameters) -> tuple[Any, Pull]:
    flat, weight = x.reshape(-1, x.shape[-1]), weights[name]

    def pull(dy: Any) -> Any:
        dflat = dy.reshape(-1, dy.shape[-1])
        gradients[name] = flat.T @ dflat
        return (dflat @ weight.T).reshape(x.shape)

    return (flat @ weight).reshape(*x.shape[:-1], -1), pull


def rms_norm(x: Any, weights: Parameters, name: str, gradients: Parameters) -> tuple[Any, Pull]:
    inverse = ((x * x).mean(axis=-1, keepdims=True) + 1e-6) ** -0.5
    normed = x * inverse

    def pull(dy: Any) -> Any:
        gradients[name] = (dy * normed).sum(axis=-2).sum(axis=0)
        dn = dy * weights[name]
        return inverse * (dn - normed * (dn * normed).mean(axis=-1, keepdims=True))

    return normed * weights[name], pull


def split_heads(x: Any, num_heads: int) -> Any:
    """Reshape [batch, tokens, heads * dim] to [batch, heads, tokens, dim]."""
    return x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2)


def join_heads(x: Any) -> Any:
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def exact(q: Any, k: Any, v: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Compute causal attention over all earlier tokens."""
    return cuflash.attention_vjp(q, k, v, causal=True)


def attention(
    x: Any, weights: Parameters, layer: int, config: Config, gradients: Parameters,
    cache: cuflash.KVCache | None = None, attend: Attend = exact,
) -> tuple[Any, Pull | None]:  # fmt: skip
    """Compute the attention of a layer; with a cache, x has only the new tokens, and there are no gradients."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    projections, pulls = {}, {}
    for name, num_heads in heads.items():
        projected, pulls[name] = linear(x, weights, f"{layer}.{name}", gradients)
        projections[name] = split_heads(projected, num_heads)
    if cache is not None:
        cache.append(projections["k"], projections["v"])
        return linear(join_heads(cache.attention(projections["q"])), weights, f"{layer}.o", gradients)[0], None
    o, vjp = attend(**projections)
    y, pull_o = linear(join_heads(o), weights, f"{layer}.o", gradients)

    def pull(dy: Any) -> Any:
        head_gradients = vjp(split_heads(pull_o(dy), config.num_heads))
        return sum(pulls[name](join_heads(gradient)) for name, gradient in zip(heads, head_gradients))

    return y, pull


def perceptron(x: Any, weights: Parameters, layer: int, gradients: Parameters) -> tuple[Any, Pull]:
    hidden, pull_up = linear(x, weights, f"{layer}.up", gradients)
    active = hidden * (hidden > 0)
    y, pull_down = linear(active, weights, f"{layer}.down", gradients)
    return y, lambda dy: pull_up(pull_down(dy) * (hidden > 0))


def forward(
    weights: Parameters, tokens: Any, config: Config, caches: list[cuflash.KVCache] | None = None,
    attend: Attend = exact,
) -> tuple[Any, Callable[[Any], Parameters]]:  # fmt: skip
    """Return logits [batch, tokens, vocabulary], and a function that computes the gradients of all parameters.

    With caches, one for each layer, `tokens` are the tokens that are not in the caches yet, and `attend` is not called.
    """
    gradients: Parameters = {}
    first = 0 if caches is None else int(caches[0].lengths[0])
    places = slice(first, first + tokens.shape[1])
    x = weights["characters"][tokens] + weights["positions"][places]
    pulls = []
    for layer in range(config.num_layers):
        normed, pull_norm = rms_norm(x, weights, f"{layer}.norm_attention", gradients)
        cache = None if caches is None else caches[layer]
        y, pull = attention(normed, weights, layer, config, gradients, cache, attend)
        pulls.append((pull, pull_norm))
        x = x + y
        normed, pull_norm = rms_norm(x, weights, f"{layer}.norm_perceptron", gradients)
        y, pull = perceptron(normed, weights, layer, gradients)
        pulls.append((pull, pull_norm))
        x = x + y
    normed, pull_norm = rms_norm(x, weights, "norm", gradients)
    logits, pull_logits = linear(normed, weights, "logits", gradients)

    def gradients_of(dlogits: Any) -> Parameters:
        dx = pull_norm(pull_logits(dlogits))
        for pull, pull_norm_of_layer in reversed(pulls):
            dx = dx + pull_norm_of_layer(pull(dx))
        flat = (tokens.reshape(-1, 1) == xp_of(dx).arange(config.vocabulary)).astype(dx.dtype)
        gradients["characters"] = flat.T @ dx.reshape(-1, config.width)
        gradients["positions"] = xp_of(dx).zeros_like(weights["positions"])
        gradients["positions"][places] = dx.sum(axis=0)
        return gradients

    return logits, gradients_of


def xp_of(array: Any) -> Any:
    """Return the module of an array: NumPy or CuPy."""
    return importlib.import_module(type(array).__module__.partition(".")[0])


def loss_and_gradients(
    weights: Parameters, tokens: Any, config: Config, attend: Attend = exact, loss_scale: float = 1
) -> tuple[float, Parameters]:
    """Return the mean cross-entropy per token in nats, and the gradients of `loss_scale` times it.

    16-bit weights give 16-bit logits; their softmax is computed in float32.
    """
    logits, gradients_of = forward(weights, tokens[:, :-1], config, attend=attend)
    xp, dtype = xp_of(logits), logits.dtype
    logits = logits.astype(np.promote_types(dtype, np.float32), copy=False)
    wanted = tokens[:, 1:, None] == xp.arange(config.vocabulary)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logs = shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))
    count = wanted.shape[0] * wanted.shape[1]
    dlogits = (xp.exp(logs) - wanted) * (loss_scale / count)
    return float(-(logs * wanted).sum() / count), gradients_of(dlogits.astype(dtype, copy=False))


def adam(
    weights: Parameters, means: Parameters, squares: Parameters, gradients: Parameters, step: int, rate: float
) -> None:
    """Update the weights and both running means from the gradients of a step; steps are numbered from 1."""
    for name, gradient in gradients.items():
        means[name] += 0.1 * (gradient - means[name])
        squares[name] += 0.01 * (gradient * gradient - squares[name])
        update = (means[name] / (1 - 0.9**step)) / ((squares[name] / (1 - 0.99**step)) ** 0.5 + 1e-8)
        weights[name] -= (rate * update).astype(weights[name].dtype)


def train(
    weights: Parameters, text: Any, config: Config, *, steps: int, batch: int, seed: int = 0, rate: float = 1e-2
) -> list[float]:
    """Run Adam on random pieces of the text; update the weights in place, and return the loss of each step."""
    rng, losses = np.random.default_rng(seed), []
    means, squares = ({name: 0 * array for name, array in weights.items()} for _ in range(2))
    for step in range(1, steps + 1):
        starts = rng.integers(0, len(text) - config.context, batch)
        tokens = text[xp_of(text).asarray(starts[:, None] + np.arange(config.context + 1))]
        loss, gradients = loss_and_gradients(weights, tokens, config)
        losses.append(loss)
        adam(weights, means, squares, gradients, step, rate * min(1, step / 20) * (1 - (step - 1) / steps))
    return losses


# Decoding


class Written(NamedTuple):
    """The characters that the model generated, the time that this took, and the bytes of the caches."""

    tokens: list[int]
    seconds: float
    cache_bytes: int


def write(weights: Parameters, prompt: Any, count: int, config: Config, *, is_cached: bool) -> Written:
    """Append the likeliest character to the prompt, `count` times."""
    xp, start = xp_of(prompt), time.perf_counter()
    caches, tokens = None, prompt[None]
    if is_cached:
        sizes = {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "capacity": config.context}
        dtype = weights["logits"].dtype
        caches = [cuflash.KVCache(batch=1, dtype=dtype, xp=xp, **sizes) for _ in range(config.num_layers)]
    written: list[int] = []
    for _ in range(count):
        logits, _ = forward(weights, tokens, config, caches)
        newest = logits[:, -1:].argmax(axis=-1)
        tokens = newest if is_cached else xp.concatenate([tokens, newest], axis=1)
        written.append(int(newest[0, 0]))
    return Written(written, time.perf_counter() - start, sum(cache.nbytes for cache in caches or ()))


def read_text() -> tuple[Any, str]:
    """Return the text as indices of characters, and the characters."""
    lines = [line for line in TEXT.read_text("utf-8").splitlines() if not line.startswith("#")]
    text = "\n".join(lines).strip()
    alphabet = "".join(sorted(set(text)))
    return np.array([alphabet.index(character) for character in text]), alphabet


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--count", type=int, default=72, help="number of characters to generate")
    parser.add_argument("--xp", choices=("numpy", "cupy"), default="numpy")
    options = parser.parse_args()
    if min(options.steps, options.batch, options.count) < 1 or options.count >= Config.context:
        parser.error(f"steps, batch and count must be positive, and count below {Config.context}")
    xp = importlib.import_module(options.xp)
    numbers, alphabet = read_text()
    config, text = Config(vocabulary=len(alphabet)), xp.asarray(numbers)
    weights = {name: xp.asarray(array) for name, array in parameters(config).items()}
    start = time.perf_counter()
    losses = train(weights, text, config, steps=options.steps, batch=options.batch)
    print(f"trained {options.steps} steps in {time.perf_counter() - start:.1f} s: "
          f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats a character")  # fmt: skip
    prompt = text[: config.context - options.count]
    ways = {"recomputed": False, "cached": True}
    runs = {way: write(weights, prompt, options.count, config, is_cached=cached) for way, cached in ways.items()}
    for way, run in runs.items():
        print(f"{way:<10} {options.count / run.seconds:7.0f} characters/s, {run.cache_bytes} bytes of cache")
    shown = "".join(alphabet[token] for token in runs["cached"].tokens)
    print(f"equal texts: {runs['recomputed'].tokens == runs['cached'].tokens}\n{shown!r}")
    formula = cuflash.study.kv_cache_bytes(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        tokens=config.context, dtype=np.float32,
    )  # fmt: skip
    print(f"kv_cache_bytes: {formula}")


if __name__ == "__main__":
    main()
