"""What does a score function, a bias or a sink cost, compared with plain attention and with the fastest peer?

    python -m experiments score_functions                                    # 8192 tokens, 16 heads of 128, bfloat16
    python -m experiments score_functions --scores softcap,bias --peers ''   # two scores, without peers

Needs an NVIDIA GPU and CuPy; PyTorch for FlexAttention, and flash-attn-4 for FlashAttention-4. Before a case is timed,
its results and gradients for a shorter problem, by the same family of kernels, are checked against their error bounds.
Times are device times of `attention` and of a `vjp` on CuPy arrays, alternating with plain attention, with the level-2
cache flushed before each call. TFLOP/s count the products of plain attention. `of_plain` is the time of plain attention
divided by the case's; `ratio` is the time of the fastest peer divided by ours. In the cases named bias, all heads share
one bias. The gradients of the reproducible bias use deterministic=True, unlike plain attention and the peers.
FlexAttention's tanh is exact, its backward pass computes the gradient of a captured array if the case has one, and it
has no sink. FlashAttention-4 is timed with its softcap, which uses the GPU's approximate tanh, and with its sink; its
backward pass does not compute the sink's gradient in this comparison.

Found:  a sink costs nothing measurable, and a bias with its gradient costs the most; docs/scores.md has the table.

Cost: Minutes of a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from cuflash import masks, scores
from cuflash.testing import Example, assert_within_bounds
from harness import Record, cases_on_gpu, check_names, gpu_versions, main, time_on_device
from rich.table import Table
from workloads import flops

BUCKETS, MAX_DISTANCE, CAP = 32, 128, 50.0
WIDTH = 64  # pixels per row of the image


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration; the defaults are those of the published run."""

    scores: tuple[str, ...] = (
        "alibi", "temperature", "softcap", "softcap_fast", "bias", "shared_bias", "shared_bias_repeatable",
        "relative_position", "relative_position_2d", "sink",
    )  # fmt: skip
    masks: tuple[str, ...] = ("full", "causal")
    seqlen: int = 8192
    num_heads: int = 16
    head_dim: int = 128
    peers: tuple[str, ...] = ("flex", "flash_attn_4")
    repeats: int = 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "peers", tuple(filter(None, self.peers)))
        check_names(self, {"scores": CASES, "masks": ("full", "causal"), "peers": PEERS})
        if min(self.seqlen, self.num_heads, self.head_dim, self.repeats) < 1:
            raise ValueError("lengths, dims and repeats must be positive")


@dataclass(frozen=True)
class Case:
    """A feature: options with captured arrays, the names of arrays with gradients, and the form that peers take."""

    arrays: Callable[[int, int], dict[str, np.ndarray]]  # takes num_heads and seqlen
    options: Callable[[dict[str, Any]], dict[str, Any]]
    wrt: tuple[str, ...] = ()
    flex: Callable[[dict[str, Any]], Callable[..., Any]] | None = None
    flash_attn_4: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    deterministic: bool = False


def _slopes(num_heads: int, seqlen: int) -> dict[str, np.ndarray]:
    return {"slopes": scores.alibi_slopes(num_heads)}


def _factors(num_heads: int, seqlen: int) -> dict[str, np.ndarray]:
    return {"factors": np.linspace(0.5, 1.5, num_heads, dtype=np.float32)}


def _biases(num_heads: int, seqlen: int) -> dict[str, np.ndarray]:
    one = np.random.default_rng(1).standard_normal((seqlen, seqlen), np.float32).astype(ml_dtypes.bfloat16)
    return {"bias": np.stack([np.roll(one, head, axis=0) for head in range(num_heads)])}


def _shared_biases(num_heads: int, seqlen: int) -> dict[str, np.ndarray]:
    return {"bias": _biases(1, seqlen)["bias"][0]}


def _flex_shared_bias(arrays: dict[str, Any]) -> Callable[..., Any]:
    return lambda s, b, h, i, j: s + arrays["bias"][i, j]


def _tables(num_heads: int, seqlen: int) -> dict[str, np.ndarray]:
    return {"table": np.random.default_rng(1).standard_normal((num_heads, BUCKETS), np.float32)}


def _offsets(num_heads: int, seqlen: int) -> dict[str, np.ndarray]:
    shape = (num_heads, 2 * -(-seqlen // WIDTH) - 1, 2 * WIDTH - 1)
    return {"table": np.random.default_rng(1).standard_normal(shape, np.float32)}


def _flex_offsets(arrays: dict[str, Any]) -> Callable[..., Any]:
    table = arrays["table"]
    rows, columns = table.shape[1] // 2, table.shape[2] // 2
    return lambda s, b, h, i, j: s + table[h, i // WIDTH - j // WIDTH + rows, i % WIDTH - j % WIDTH + columns]


def _sinks(num_heads: int, seqlen: int) -> dict[str, np.ndarray]:
    return {"sink": np.random.default_rng(1).standard_normal(num_heads, np.float32)}


def _flex_table(arrays: dict[str, Any]) -> Callable[..., Any]:
    import torch

    table = arrays["table"]
    bias = scores.relative_position(np.zeros((1, BUCKETS), np.float32), MAX_DISTANCE, bidirectional=True)
    bucket = torch.from_numpy(np.asarray(bias.arrays["bucket"])).to(table.device)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h, bucket[torch.clamp(j - i + MAX_DISTANCE, 0, 2 * MAX_DISTANCE)]]

    return score


def _flex_softcap(arrays: dict[str, Any]) -> Callable[..., Any]:
    import torch

    return lambda s, b, h, i, j: CAP * torch.tanh(s / CAP)


def _flash_softcap(arrays: dict[str, Any]) -> dict[str, Any]:
    return {"softcap": CAP}


CASES = {
    "alibi": Case(
        _slopes, lambda arrays: {"score": scores.alibi(arrays["slopes"])},
        flex=lambda arrays: lambda s, b, h, i, j: s - arrays["slopes"][h] * (i - j).abs(),
    ),
    "temperature": Case(
        _factors, lambda arrays: {"score": scores.temperature(arrays["factors"])},
        flex=lambda arrays: lambda s, b, h, i, j: s * arrays["factors"][h],
    ),
    "softcap": Case(
        lambda *sizes: {}, lambda arrays: {"softcap": CAP}, flex=_flex_softcap, flash_attn_4=_flash_softcap
    ),
    "softcap_fast": Case(
        lambda *sizes: {}, lambda arrays: {"score": scores.softcap(CAP, fast=True)}, flex=_flex_softcap,
        flash_attn_4=_flash_softcap,
    ),
    "bias": Case(
        _biases, lambda arrays: {"bias": arrays["bias"]}, ("bias",),
        lambda arrays: lambda s, b, h, i, j: s + arrays["bias"][h, i, j],
    ),
    "shared_bias": Case(_shared_biases, lambda arrays: {"bias": arrays["bias"]}, ("bias",), _flex_shared_bias),
    "shared_bias_repeatable": Case(
        _shared_biases, lambda arrays: {"bias": arrays["bias"]}, ("bias",), _flex_shared_bias, deterministic=True
    ),
    "relative_position": Case(
        _tables,
        lambda arrays: {"score": scores.relative_position(arrays["table"], MAX_DISTANCE, bidirectional=True)},
        ("table",), _flex_table,
    ),
    "relative_position_2d": Case(
        _offsets, lambda arrays: {"score": scores.relative_position_2d(arrays["table"], WIDTH)}, ("table",),
        _flex_offsets,
    ),
    "sink": Case(
        _sinks, lambda arrays: {"sink": arrays["sink"]}, ("sink",),
        flash_attn_4=lambda arrays: {"learnable_sink": arrays["sink"].bfloat16()},
    ),
}  # fmt: skip


def inputs(num_heads: int, seqlen: int, head_dim: int) -> list[np.ndarray]:
    """Draw q, k, v and dO, bfloat16 [num_heads, seqlen, head_dim], from the standard normal distribution."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((num_heads, seqlen, head_dim), np.float32).astype(ml_dtypes.bfloat16) for _ in "qkvo"]


def check(case: Case, causal: bool, head_dim: int, kernel: str) -> None:
    """Assert that each result of a short problem, computed by a family of kernels, is within its error bound.

    Raises
    ------
    AssertionError
        An element exceeds its bound.
    """
    import cupy

    (q, k, v, do), arrays = inputs(4, 400, head_dim), case.arrays(4, 400)
    device = {name: cupy.asarray(array) for name, array in arrays.items()}
    o, vjp = cuflash.attention_vjp(
        *map(cupy.asarray, (q, k, v)), causal=causal, wrt=case.wrt, kernel=kernel, deterministic=case.deterministic,
        **case.options(device),
    )  # fmt: skip
    gradients = vjp(cupy.asarray(do))
    score, sink = scores.bias(arrays["bias"]) if "bias" in arrays else None, arrays.get("sink")
    options = case.options(arrays)
    if "softcap" in options:
        score = scores.softcap(options["softcap"])
    example = Example(
        q=q, k=k, v=v, do=do, mask=masks.Causal() if causal else None, score=options.get("score", score), sink=sink,
        wrt=tuple(name for name in case.wrt if name != "sink"), product_dtype=q.dtype,
    )  # fmt: skip
    results = {"o": o, **dict(zip(("dq", "dk", "dv"), gradients))}
    if sink is not None:
        results["dsink"] = gradients["sink"]
    others = {name: cupy.asnumpy(gradients[name]) for name in example.wrt}
    assert_within_bounds(example, others=others, **{name: cupy.asnumpy(x) for name, x in results.items()})


class FlexCase:
    """FlexAttention with a case's score function, on the same arrays."""

    def __init__(self, case: Case, causal: bool, operands: list[Any], do: Any, arrays: dict[str, Any]) -> None:
        import torch
        from torch.nn.attention import flex_attention as flexible

        assert case.flex is not None
        torch._dynamo.reset()
        tensors = {name: torch.from_dlpack(array) for name, array in arrays.items()}
        self._captured = [tensors[name].requires_grad_() for name in case.wrt]
        self._inputs = [torch.from_dlpack(x)[None].requires_grad_() for x in operands]
        self._do, seqlen = torch.from_dlpack(do)[None], operands[0].shape[-2]
        block_mask = None
        if causal:
            block_mask = flexible.create_block_mask(
                lambda b, h, i, j: i >= j, None, None, seqlen, seqlen, device="cuda"
            )
        compiled = torch.compile(flexible.flex_attention, dynamic=False, fullgraph=True)
        score = case.flex(tensors)
        self._attend = lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=block_mask)
        self._o = self._attend(*self._inputs)

    def forward(self) -> Any:
        import torch

        with torch.no_grad():
            return self._attend(*self._inputs)

    def backward(self) -> Any:
        import torch

        return torch.autograd.grad(self._o, [*self._inputs, *self._captured], self._do, retain_graph=True)


class FlashCase:
    """FlashAttention-4 with a case's options, on the same arrays in its own layout, with tokens first."""

    def __init__(self, case: Case, causal: bool, operands: list[Any], do: Any, arrays: dict[str, Any]) -> None:
        import torch
        from flash_attn.cute import flash_attn_func

        assert case.flash_attn_4 is not None
        options = case.flash_attn_4({name: torch.from_dlpack(array) for name, array in arrays.items()})
        *inputs, self._do = (torch.from_dlpack(x)[None].transpose(1, 2).contiguous() for x in (*operands, do))
        self._inputs = [x.requires_grad_() for x in inputs]
        self._attend = lambda q, k, v: flash_attn_func(q, k, v, causal=causal, **options)
        output = self._attend(*self._inputs)
        self._o = output[0] if isinstance(output, tuple) else output

    def forward(self) -> Any:
        import torch

        with torch.no_grad():
            return self._attend(*self._inputs)

    def backward(self) -> Any:
        import torch

        return torch.autograd.grad(self._o, self._inputs, self._do, retain_graph=True)


PEERS = {"flex": FlexCase, "flash_attn_4": FlashCase}


def peers_of(
    names: tuple[str, ...], case: Case, *arguments: Any
) -> tuple[dict[str, FlexCase | FlashCase], dict[str, str]]:
    """Return the peers that support a case, and the reasons why others do not."""
    peers, notes = dict[str, FlexCase | FlashCase](), dict[str, str]()
    for name in names:
        if getattr(case, name) is None:
            notes[name] = "is not requested for this"
            continue
        try:
            peer = PEERS[name](case, *arguments)
            peer.backward()
            peers[name] = peer
        except Exception as error:  # peers' compilers raise different errors
            notes[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:120]
    return peers, notes


def best_of(ours_ms: float, theirs_ms: dict[str, float], notes: dict[str, str]) -> Record:
    """Return the fastest peer, its time, and that time relative to ours; or the reason why none was timed."""
    if not theirs_ms:
        why = "; ".join(f"{name} {note}" for name, note in notes.items())
        return {"best_peer": why, "peer_ms": None, "ratio": None}
    best = min(theirs_ms, key=lambda name: theirs_ms[name])
    return {"best_peer": best, "peer_ms": theirs_ms[best], "ratio": theirs_ms[best] / ours_ms}


def measured(config: Config, name: str, mask: str) -> Iterator[Record]:
    """Yield the rows of one case: forward and backward."""
    import cupy

    case, causal = CASES[name], mask == "causal"
    *operands, do = map(cupy.asarray, inputs(config.num_heads, config.seqlen, config.head_dim))
    arrays = {key: cupy.asarray(x) for key, x in case.arrays(config.num_heads, config.seqlen).items()}
    options = case.options(arrays)
    settings = {"causal": causal, "wrt": case.wrt, "deterministic": case.deterministic}
    plan = cuflash.plan(*operands, **settings, **options)
    assert plan._plan.family is not None and plan._plan.kernels is not None
    check(case, causal, config.head_dim, plan._plan.family.name)
    _, plain_vjp = cuflash.attention_vjp(*operands, causal=causal)
    _, vjp = cuflash.attention_vjp(*operands, **settings, **options)
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {
            "plain": lambda: cuflash.attention(*operands, causal=causal),
            "ours": lambda: cuflash.attention(*operands, causal=causal, **options),
        },
        "backward": {"plain": lambda: plain_vjp(do), "ours": lambda: vjp(do)},
    }
    peers, notes = peers_of(config.peers, case, causal, operands, do, arrays)
    for name_of_peer, peer in peers.items():
        calls["forward"][name_of_peer], calls["backward"][name_of_peer] = peer.forward, peer.backward
    for way, timed in calls.items():
        timings = time_on_device(timed, repeats=config.repeats)
        ours, plain = timings["ours"], timings["plain"]
        shape = {"seqlen": config.seqlen, "num_heads": config.num_heads, "head_dim": config.head_dim}
        work = flops(way, mask, batch=1, **shape)
        specs = getattr(plan._plan.kernels, way).specs
        yield {
            "score": name, "mask": mask, "pass": way, "kernel": specs[way].family,
            **shape, "ms": ours.median_ms, "spread_ms": ours.spread_ms, "tflops": work / ours.median_ms / 1e9,
            "of_plain": plain.median_ms / ours.median_ms,
            **best_of(ours.median_ms, {each: timings[each].median_ms for each in peers}, notes), **gpu_versions(),
        }  # fmt: skip


def run(config: Config) -> Iterator[Record]:
    """Yield one row for each score, mask and pass."""
    for name, mask in cases_on_gpu(config.scores, config.masks):
        yield from measured(config, name, mask)


def table(records: list[Record]) -> Table:
    shown = Table("score", "mask", "pass", "kernel", "ms", "TFLOP/s", "of plain", "peer", "peer / ours")
    for record in records:
        ratio = "" if record["ratio"] is None else f"{record['ratio']:.2f}"
        shown.add_row(
            record["score"], record["mask"], record["pass"], record["kernel"], f"{record['ms']:.3f}",
            f"{record['tflops']:.0f}", f"{record['of_plain']:.2f}", record["best_peer"], ratio,
        )  # fmt: skip
    return shown


if __name__ == "__main__":
    main(Config, run, table, replacing=("gpu", "score", "mask", "pass", "seqlen", "num_heads", "head_dim"))
