"""How long does a training step of a Llama model take with cuflash.torch as its attention, compared with PyTorch's?

    python -m experiments training_step

It needs an NVIDIA GPU with CuPy, PyTorch and transformers. A step is the forward pass, the loss and the backward pass
of a model with random weights in bfloat16, timed until the device has finished. The attention function is the one in
docs/transformers.md. `of_sdpa` is our time divided by that of PyTorch's scaled_dot_product_attention.

Found:  on an H100, a step takes 0.97 to 1.07 times as long as with PyTorch's attention, less than the variation of
single steps; results/training_step.csv has the times.

Cost: A minute of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compared_steps import Step, compared, table_of
from harness import Record, gpu_versions, main, track, why_no_gpu
from rich.table import Table

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
OURS = "exact"  # the name under which docs/transformers.md registers it
WAYS = ("sdpa", OURS)
ROW = ("attention", "tokens")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The model and the lengths; the defaults are the published run."""

    tokens: tuple[int, ...] = (512, 2048, 8192)
    tokens_of_batch: int = 4096  # tokens per batch, which has at least one sequence
    hidden_size: int = 1024
    layers: int = 4
    heads: int = 16
    kv_heads: int = 4
    repeats: int = 100  # many, because a step waits for the host, whose times vary


def register() -> None:
    """Run the first code block of docs/transformers.md, which registers the attention function."""
    text = PAGE.read_text("utf-8")
    exec(compile(text.split("```python\n", 1)[1].split("```", 1)[0], str(PAGE), "exec"), {})


class Training:
    """A model with an attention function; all models have the same weights and tokens."""

    def __init__(self, config: Config, attention: str, tokens: int) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        described = LlamaConfig(
            hidden_size=config.hidden_size, intermediate_size=11 * config.hidden_size // 4,
            num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
            vocab_size=8192, max_position_embeddings=2 * tokens,
        )  # fmt: skip
        self._model = LlamaForCausalLM(described).to("cuda", torch.bfloat16).train()
        self._model.set_attn_implementation(attention)
        self.batch = max(1, config.tokens_of_batch // tokens)
        self._ids = torch.randint(0, 8192, (self.batch, tokens), device="cuda")

    def step(self) -> Any:
        """Run one step and return the loss once all gradients are on the device."""
        import torch

        self._model.zero_grad(set_to_none=True)
        loss = self._model(self._ids, labels=self._ids).loss
        loss.backward()
        torch.cuda.synchronize()
        return loss.detach()

    def gradients(self) -> Any:
        """Return the gradients of all parameters after a step, as one vector."""
        import torch

        gradients = [parameter.grad.float().flatten() for parameter in self._model.parameters()]
        return torch.cat(gradients).cpu().numpy()


def run(config: Config) -> Iterator[Record]:
    missing = why_no_gpu()
    if missing:
        raise SystemExit(f"training_step needs an NVIDIA GPU: {missing}")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise SystemExit(f"training_step needs PyTorch and transformers: {error}") from None
    register()
    versions = gpu_versions() | {"torch": torch.__version__, "transformers": transformers.__version__}
    for tokens in track(config.tokens, "lengths"):
        trained = {way: Training(config, way, tokens) for way in WAYS}
        steps = {way: Step(each.step, float(each.step()), each.gradients()) for way, each in trained.items()}
        facts = {"tokens": tokens, "batch": trained[OURS].batch}
        for record in compared(steps, OURS, "of_sdpa", facts, repeats=config.repeats, warmup=3):
            yield record | versions


def table(records: list[Record]) -> Table:
    return table_of(records, "ms of a training step", ROW, "of_sdpa")


if __name__ == "__main__":
    main(Config, run, table, replacing=ROW)
