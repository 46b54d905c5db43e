"""How long does a compiled training step of a small model take in JAX and PyTorch, compared with their own attention?

    python -m experiments compiled_step                               # both libraries, on their default devices
    python -m experiments compiled_step --libraries jax

The model is a decoder with random weights: embeddings, layers of causal attention and a perceptron, and a prediction of
the next token. A step is the forward pass, the loss and the backward pass, compiled by `jax.jit`, or by
`torch.compile` without a graph break. It is timed until the device has finished. JAX's own attention is
`jax.nn.dot_product_attention`, with cuDNN on a GPU; PyTorch's is `scaled_dot_product_attention`. `of_other` is our time
divided by that of the library's attention, `gradient_error` the relative difference of the gradients of all weights.

Found:  on an H200, a step takes 1.00 times as long as with cuDNN in JAX at 512 tokens, 0.92 times at 2048, and 1.21
times as long as with scaled_dot_product_attention in PyTorch at 512 tokens, where the host limits both.

Cost: Two minutes of a GPU, most of them for compilers; seconds on the host with --tokens 128 --layers 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from compared_steps import Step, compared, table_of
from harness import Record, check_names, main, track
from rich.table import Table

LIBRARIES = ("jax", "torch")
MODES = ("default", "reduce-overhead")
ROW = ("library", "attention", "mode", "tokens")
Weights = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The model and the lengths; the defaults are the published run."""

    libraries: tuple[str, ...] = LIBRARIES
    modes: tuple[str, ...] = ("default",)  # of torch.compile
    tokens: tuple[int, ...] = (512, 2048)
    tokens_of_batch: int = 4096  # at least one sequence
    vocabulary: int = 512
    layers: int = 4
    heads: int = 8
    head_dim: int = 64
    dtype: str = "bfloat16"
    repeats: int = 50

    def __post_init__(self) -> None:
        check_names(self, {"libraries": LIBRARIES, "modes": MODES})


def weights_of(config: Config) -> Weights:
    """Return the weights in float32, by name."""
    rng, width = np.random.default_rng(0), config.heads * config.head_dim
    shapes = {"embedding": (config.vocabulary, width), "last": (width, config.vocabulary)}
    for layer in range(config.layers):
        shapes |= {f"{layer}.qkv": (width, 3 * width), f"{layer}.out": (width, width)}
        shapes |= {f"{layer}.up": (width, 4 * width), f"{layer}.down": (4 * width, width)}
    return {name: rng.standard_normal(shape, np.float32) / shape[0] ** 0.5 for name, shape in shapes.items()}


def ids_of(config: Config, tokens: int) -> Any:
    """Return token numbers [batch, tokens]."""
    batch = max(1, config.tokens_of_batch // tokens)
    return np.random.default_rng(1).integers(0, config.vocabulary, (batch, tokens))


def normed(x: Any) -> Any:
    return x * ((x * x).mean(-1)[..., None] + 1e-6) ** -0.5


def logits_of(weights: Weights, ids: Any, config: Config, attend: Callable[[Any, Any, Any], Any]) -> Any:
    """Return logits [batch, tokens, vocabulary]; `attend` takes arrays with tokens before heads."""
    x = weights["embedding"][ids]
    batch, tokens, width = x.shape
    for layer in range(config.layers):
        qkv = (normed(x) @ weights[f"{layer}.qkv"]).reshape(batch, tokens, 3, config.heads, config.head_dim)
        o = attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
        x = x + o.reshape(batch, tokens, width) @ weights[f"{layer}.out"]
        hidden = normed(x) @ weights[f"{layer}.up"]
        x = x + (hidden * (hidden > 0)) @ weights[f"{layer}.down"]
    return normed(x) @ weights["last"]


def heads_first(attention: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    """Return causal attention of arrays with tokens before heads by a function of arrays with heads first."""
    return lambda q, k, v: attention(q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)).swapaxes(1, 2)


def step_of(call: Callable[[], tuple[Any, Weights]], as_numpy: Callable[[Any], Any]) -> Step:
    """Run a compiled step, which returns the loss and the gradients by name, and return it with its results.

    Parameters
    ----------
    call : callable
        Runs the step until the device has finished.
    as_numpy : callable
        Returns a gradient as a NumPy array in float32.
    """
    loss, gradients = call()
    return Step(call, float(loss), np.concatenate([as_numpy(gradients[name]).ravel() for name in sorted(gradients)]))


def steps_of_jax(config: Config, tokens: int) -> dict[str, Step]:
    """Return a step with each attention, by its name; ours is "cuflash"."""
    from functools import partial

    import cuflash.jax
    import jax

    own = "cudnn" if jax.devices()[0].platform == "gpu" else "xla"
    attentions = {
        own: lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=own),
        "cuflash": heads_first(partial(cuflash.jax.attention, causal=True, memory="tokens_first")),
    }
    weights = {name: jax.numpy.asarray(array, config.dtype) for name, array in weights_of(config).items()}
    ids = jax.numpy.asarray(ids_of(config, tokens))

    def step(attend: Callable[..., Any]) -> Step:
        def loss(weights: Weights, ids: Any) -> Any:
            logits = logits_of(weights, ids, config, attend)[:, :-1].astype("float32")
            of_next = jax.numpy.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], -1)
            return -of_next.mean()

        compiled = jax.jit(jax.value_and_grad(loss))
        return step_of(lambda: jax.block_until_ready(compiled(weights, ids)), lambda x: np.asarray(x, np.float32))

    return {name: step(attend) for name, attend in attentions.items()}


def steps_of_torch(config: Config, tokens: int, mode: str) -> dict[str, Step]:
    """Return a step with each attention, by its name; ours is "cuflash"."""
    import cuflash.torch
    import torch
    from torch.nn.functional import cross_entropy, scaled_dot_product_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, config.dtype)
    ids = torch.from_numpy(ids_of(config, tokens)).to(device)
    weights = {name: torch.from_numpy(array).to(device, dtype) for name, array in weights_of(config).items()}
    for weight in weights.values():
        weight.requires_grad_()

    def sdpa(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return cuflash.torch.attention(q, k, v, causal=True)

    def step(attention: Callable[..., Any]) -> Step:
        attend = heads_first(attention)

        def loss(weights: Weights, ids: Any) -> Any:
            logits = logits_of(weights, ids, config, attend)[:, :-1].float()
            return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

        compiled = torch.compile(loss, fullgraph=True, mode=None if mode == "default" else mode)

        def trained() -> tuple[Any, Weights]:
            torch.compiler.cudagraph_mark_step_begin()
            value = compiled(weights, ids)
            gradients = torch.autograd.grad(value, [*weights.values()])
            if device == "cuda":
                torch.cuda.synchronize()
            return value.detach(), dict(zip(weights, gradients))

        return step_of(trained, lambda x: x.float().cpu().numpy())

    return {"sdpa": step(sdpa), "cuflash": step(ours)}


def run(config: Config) -> Iterator[Record]:
    cases = [
        (library, mode, tokens) for library in config.libraries for tokens in config.tokens
        for mode in (config.modes if library == "torch" else ("default",))
    ]  # fmt: skip
    for library, mode, tokens in track(cases, "cases"):
        try:
            version = __import__(library).__version__
        except ImportError as error:
            print(f"no rows of {library}: {error}")
            continue
        is_torch = library == "torch"
        steps = steps_of_torch(config, tokens, mode) if is_torch else steps_of_jax(config, tokens)
        facts = {"library": library, "mode": mode, "tokens": tokens, "batch": max(1, config.tokens_of_batch // tokens)}
        for record in compared(steps, "cuflash", "of_other", facts, repeats=config.repeats, warmup=2):
            yield record | {
                "layers": config.layers, "heads": config.heads, "head_dim": config.head_dim, "dtype": config.dtype,
                "version": version,
            }  # fmt: skip


def table(records: list[Record]) -> Table:
    return table_of(records, "ms of a compiled training step", ROW, "of_other")


if __name__ == "__main__":
    main(Config, run, table, replacing=ROW)
