"""A task that only waits, for the tests of sweeps and the experiment on their overhead."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Config:
    """The duration of a nap, and a number that distinguishes naps of equal duration."""

    seconds: float = 1.0
    number: int = 0


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Sleep, then yield one row."""
    time.sleep(config.seconds)
    yield {"slept": config.seconds}
