"""Which tile suits a device? The choice in cuflash/tiles.py is this script's result.

    python experiments/tile_sweep.py

Host part: forward and backward of the cpu executor, float32, for tiles of scores of every shape, with the tiles on
threads of their own (BLAS on one) or one after the other (BLAS on all); and the two exponentials of NumPy.

Expect: tall tiles, as many keys as stream through the cache well; threads win by the share of softmax in the work.
Found:  threads win 1.2 to 1.4 times; forward hardly depends on the tile from 256 queries on, backward slows by a third
once its two tiles of scores leave the level-2 cache. 512 x 512 is best in both. exp2 takes half of exp's time.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import cuflash
import numpy as np
from cuflash.launch import Executable
from cuflash.tiles import Tile
from harness import Record, main, time_alternately, track
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shapes of the published run."""

    num_heads: int = 2
    seqlen: int = 4096
    head_dim: int = 64
    blocks_q: tuple[int, ...] = (128, 256, 512)
    blocks_kv: tuple[int, ...] = (512, 1024, 4096)
    repeats: int = 3


def at_tile(ready: Executable, tile: Tile, is_threaded: bool) -> Executable:
    """The same call at another tile."""
    plan = ready.plan
    device = plan.device if is_threaded else dataclasses.replace(plan.device, num_processors=1)
    work = dataclasses.replace(plan.work, block_q=tile.block_q, block_kv=tile.block_kv)
    return Executable(dataclasses.replace(plan, tile=tile, work=work, device=device))


def exponentials(size: int = 1 << 20) -> dict[str, Callable[[], object]]:
    """exp and exp2 of a float32 array that fits the cache."""
    x = -np.random.default_rng(0).random(size, np.float32)
    y = np.empty_like(x)
    return {"exp": lambda: np.exp(x, out=y), "exp2": lambda: np.exp2(x, out=y)}


def run(config: Config) -> list[Record]:
    """One record a tile, way and number of threads; two for the exponentials."""
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, config.num_heads, config.seqlen, config.head_dim), np.float32)
    ready = cuflash.plan(q, k, v)
    expected, lse = ready.forward(q, k, v)
    bound = cuflash.error_bound(q[:, :64], k, v).o
    records = [
        {"way": name, "ms": timing.median_ms} for name, timing in time_alternately(exponentials(), repeats=50).items()
    ]
    tiles = [Tile(block_q, block_kv) for block_q in config.blocks_q for block_kv in config.blocks_kv]
    for is_threaded in (True, False):
        for tile in track(tiles, "tiles on threads" if is_threaded else "BLAS on threads"):
            swept = at_tile(ready, tile, is_threaded)
            if not (np.abs(swept.forward(q, k, v)[0] - expected)[:, :64] <= 2 * bound).all():
                raise AssertionError(f"forward at {tile} is outside its bound")
            calls: dict[str, Callable[[], object]] = {
                "forward": lambda swept=swept: swept.forward(q, k, v),
                "backward": lambda swept=swept: swept.backward(do, q, k, v, expected, lse),
            }
            for way, timing in time_alternately(calls, repeats=config.repeats).items():
                row: Record = {"way": way, "threads": "tiles" if is_threaded else "BLAS"} | dataclasses.asdict(tile)
                records.append(row | {"seqlen": config.seqlen, "ms": timing.median_ms, "spread_ms": timing.spread_ms})
    return records


def table(records: list[Record]) -> Table:
    """Milliseconds by tile."""
    shown = Table(title="cpu executor by tile, ms")
    for column in ("way", "threads", "block_q", "block_kv", "ms"):
        shown.add_column(column, justify="left" if column in ("way", "threads") else "right")
    for row in records:
        texts = (str(row.get(name, "")) for name in ("way", "threads", "block_q", "block_kv"))
        shown.add_row(*texts, f"{row['ms']:.2f}")
    return shown


if __name__ == "__main__":
    main(Config, run, table)
