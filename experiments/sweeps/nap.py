"""A task that only waits: the tests of sweeps, and the experiment on their overhead, run it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Config:
    """The length of a nap, and a number that tells equal naps apart."""

    seconds: float = 1.0
    number: int = 0


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Yield one row, after the nap."""
    time.sleep(config.seconds)
    yield {"slept": config.seconds}
