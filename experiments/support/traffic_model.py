"""The bytes of GPU memory that kernels read and write, by the papers' I/O model."""

from typing import Any

import cuflash
from cuflash.planning.families.fa1 import traffic

WAYS = ("forward", "backward")


def modelled(ready: Any) -> dict[tuple[str, str], int]:
    """Return the bytes of each kernel of a plan, by pass and name: for "fa1" by its loops, else each array once."""
    plan = ready._plan
    if plan.family.name == "fa1":
        both = traffic(plan.problem, plan.kernels, plan.visited_scores)
        return {(way, f"fa1_{way}"): moved for way, moved in zip(WAYS, both)}
    return {
        (way, kernel.name): kernel.hbm_bytes
        for way in WAYS for kernel in cuflash.study.roofline(ready, which=way).kernels
    }  # fmt: skip
