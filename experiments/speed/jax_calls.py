"""How long does a call in JAX take, compared with cuDNN's attention, with empty calls, and with calls of CuPy?

    python -m experiments jax_calls                                   # on JAX's default device
    python -m experiments jax_calls --ways jit --passes forward

It needs JAX; on a GPU also CuPy. Calls are made one after the other, as in a training loop: a time is that of a batch
of calls, from the first call until the device has finished the last one, divided by the number of calls, so that the
host's time counts where it is longer than the device's. `both` is o and the gradients of q, k and v.
`jit` calls one jitted function; `eager` calls the same function outside of `jax.jit`.

Libraries: `cudnn` and `xla` are `jax.nn.dot_product_attention`, whose arrays have tokens before heads. `empty` calls
Python functions that do nothing, through `buffer_callback`, with as many buffers as ours: what remains is our host
time, launches included. `plus_one` is `jax.jit` of q + 1, timed next to forward passes of both ways. `cupy` is
`cuflash.attention_vjp` on CuPy arrays. Rows of `long_tokens` are calls that take the device much longer than the host,
so that times are the device's. `of_best` is the best time of cudnn and xla divided by ours, `over_empty_us` ours minus
that of empty calls, `of_cupy` ours divided by that of CuPy.

Found:  on an H200 under jit, 512 tokens take 76 us forward and 82 with gradients (cuDNN 107 and 140), and 4096 tokens
191 and 584 us (cuDNN 217 and 706). An eager call takes 84 us, and 1789 us with gradients, in batches of 4 calls.

Cost: Half a minute of a GPU, most of it for compilers; seconds on the host with --tokens 64 --long-tokens 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from harness import Record, check_names, gpu_versions, main, time_alternately, track, why_no_gpu
from rich.table import Table

PASSES = ("forward", "both")
WAYS = ("jit", "eager")
OTHERS = ("cudnn", "xla", "empty", "plus_one", "cupy")
ROW = ("library", "way", "pass", "tokens")
Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The cases to time; the defaults are the published run."""

    batch: int = 2
    heads: int = 8
    tokens: int = 512
    long_tokens: int = 4096
    head_dim: int = 64
    passes: tuple[str, ...] = PASSES
    ways: tuple[str, ...] = WAYS
    others: tuple[str, ...] = OTHERS
    dtype: str = "bfloat16"
    calls: int = 20
    few_calls: int = 4  # calls of a batch with `long_tokens`
    repeats: int = 15

    def __post_init__(self) -> None:
        check_names(self, {"passes": PASSES, "ways": WAYS, "others": OTHERS})


class Unavailable(Exception):
    """A library that has no call of a case."""


def drawn(config: Config, tokens: int) -> list[Any]:
    """Return q, k, v and do on JAX's default device."""
    import jax

    shape = config.batch, config.heads, tokens, config.head_dim
    return [jax.random.normal(key, shape, config.dtype) for key in jax.random.split(jax.random.key(0), 4)]


def attention_of(library: str) -> Callable[[Any, Any, Any], Any]:
    """Return attention of arrays whose heads are before or, for `dot_product_attention`, after their tokens."""
    import cuflash.jax
    import jax

    if library == "cuflash":
        return cuflash.jax.attention
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation=library)


def function_of(library: str, name: str) -> Callable[..., Any]:
    """Return the function of (q, k, v, do) that is timed."""
    import jax

    attend = attention_of(library)
    if name == "forward":
        return lambda q, k, v, do: attend(q, k, v)

    def both(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(do)

    return both


def of_jax(library: str, way: str, name: str, arrays: list[Any]) -> Call:
    """Return a call of attention."""
    import jax

    if library in ("cudnn", "xla"):
        arrays = [array.swapaxes(1, 2) for array in arrays]
    function = function_of(library, name)
    run = jax.jit(function) if way == "jit" else function
    return lambda: run(*arrays)


def empty(way: str, name: str, arrays: list[Any]) -> Call:
    """Return a call of as many buffers as `cuflash.jax.attention` has, through functions that do nothing."""
    import jax
    from jax.experimental.buffer_callback import buffer_callback

    if way != "jit":
        raise Unavailable("an empty call is made under jit")
    q, *_ = arrays
    o, lse = (jax.ShapeDtypeStruct(shape, kind) for shape, kind in ((q.shape, q.dtype), (q.shape[:-1], "float32")))
    scratch = jax.ShapeDtypeStruct((256,), "uint8")
    forward = buffer_callback(lambda context, results, *buffers: None, (o, lse))
    backward = buffer_callback(lambda context, results, *buffers: None, (o, o, o, scratch))

    def run(q: Any, k: Any, v: Any, do: Any) -> Any:
        results = forward(q, k, v)
        return results if name == "forward" else (results[0], *backward(do, q, k, v, *results))

    jitted = jax.jit(run)
    return lambda: jitted(*arrays)


def plus_one(name: str, arrays: list[Any]) -> Call:
    """Return a call of a function that JAX compiles to one kernel."""
    import jax

    if name != "forward":
        raise Unavailable("it is the least that a forward pass may take")
    run = jax.jit(lambda q, k, v: q + 1)
    return lambda: run(*arrays[:3])


def of_cupy(name: str, arrays: list[Any]) -> Call:
    """Return the same call on CuPy arrays, whose results have the same bits."""
    if missing := why_no_gpu():
        raise Unavailable(missing)
    import cuflash
    import cupy

    q, k, v, do = map(cupy.from_dlpack, arrays)
    if name == "forward":
        return lambda: cuflash.attention(q, k, v)

    def both() -> Any:
        o, vjp = cuflash.attention_vjp(q, k, v)
        return o, *vjp(do)

    return both


def call_of(library: str, way: str, name: str, arrays: list[Any]) -> Call:
    if library == "empty":
        return empty(way, name, arrays)
    if library == "plus_one":
        return plus_one(name, arrays)
    return of_cupy(name, arrays) if library == "cupy" else of_jax(library, way, name, arrays)


def batch_of(library: str, call: Call, count: int) -> Call:
    """Return a function that makes many calls, then waits for the device."""

    def calls() -> None:
        result: Any = None
        for _ in range(count):
            result = call()
        if library == "cupy":
            import cupy

            cupy.cuda.get_current_stream().synchronize()
        else:
            import jax

            jax.block_until_ready(result)

    return calls


def timed(config: Config, way: str, name: str, tokens: int) -> Iterator[Record]:
    """Yield the rows of one case."""
    arrays, calls = drawn(config, tokens), dict[str, Call]()
    count = config.few_calls if tokens == config.long_tokens else config.calls
    for library in ("cuflash", *config.others):
        try:
            call = call_of(library, way, name, arrays)
            call()
        except Unavailable:
            continue
        except (ValueError, RuntimeError, NotImplementedError) as error:
            if library not in ("cudnn", "xla"):
                raise
            print(f"no rows of {library}, {way}, {name}, {tokens} tokens: {str(error).splitlines()[0]}")
            continue
        calls[library] = batch_of(library, call, count)
    timings = time_alternately(calls, repeats=config.repeats, warmup=2)
    us = {library: timing.median_ms * 1e3 / count for library, timing in timings.items()}
    best = min((us[library] for library in ("cudnn", "xla") if library in us), default=None)
    for library, value in us.items():
        is_ours = library == "cuflash"
        yield {
            "library": library, "way": way, "pass": name, "tokens": tokens, "batch": config.batch,
            "heads": config.heads, "head_dim": config.head_dim, "dtype": config.dtype, "us": value,
            "spread_us": timings[library].spread_ms * 1e3 / count,
            "of_best": best / value if is_ours and best is not None else None,
            "over_empty_us": value - us["empty"] if is_ours and "empty" in us else None,
            "of_cupy": value / us["cupy"] if is_ours and "cupy" in us else None, "calls": count,
        }  # fmt: skip


def run(config: Config) -> Iterator[Record]:
    try:
        import jax
    except ImportError as error:
        raise SystemExit(f"jax_calls needs JAX: {error}") from None
    platform = jax.devices()[0].platform
    versions: Record = {"jax": jax.__version__, "platform": platform}
    if platform == "gpu":
        versions |= gpu_versions()
    lengths = dict.fromkeys((config.tokens, config.long_tokens))
    cases = [
        (way, name, tokens) for tokens in lengths for way in config.ways for name in config.passes
        if way == "jit" or tokens == config.tokens
    ]  # fmt: skip
    for case in track(cases, "cases"):
        for row in timed(config, *case):
            yield row | versions


def table(records: list[Record]) -> Table:
    result = Table(title="us of a call")
    ratios = "of_best", "over_empty_us", "of_cupy"
    for column in (*ROW, "us", *ratios):
        result.add_column(column)
    for row in records:
        shown = ("" if row[name] is None else f"{row[name]:.2f}" for name in ratios)
        result.add_row(*(str(row[column]) for column in ROW), f"{row['us']:.1f}", *shown)
    return result


if __name__ == "__main__":
    main(Config, run, table, replacing=ROW)
