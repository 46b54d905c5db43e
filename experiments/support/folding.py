"""Folding of long tables on the pages: about ten rows are shown, and all rows after a click."""

import re

LONG = 12  # maximum number of rows of a table that is not folded
MOST_SHOWN = 10

# For each long table, the values by column of the rows that stay visible. A table without an entry is folded entirely,
# under a summary line.
SHOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "code-structure": {
        "count": ("code lines", "escapes from types", "physical lines", "modules / hand-overs / functions")
    },
    "cpu-speed": {"seqlen": ("4096",), "density": ("1",)},
    "decode": {"sequences": ("64",)},
    "flash-ladder-gpu": {"tokens": ("8192",)},
    "flashattention1": {"pass": ("both",), "tokens": ("1024", "8192")},
    "fp8-speed": {"columns": ("128",), "tokens": ("4096", "16384")},
    "host-time": {
        "call": ("attention", "attention_vjp", "vjp", "plan.forward", "plan.backward"),
        "mask": ("none", "same BlockIndex"),
    },
    "memory-traffic": {"tokens": ("4096", "16384")},
    "packed": {
        "case": ("mixed",),
        "library": ("cuflash", "torch_flash", "flash_attn_4", "flashinfer", "flex"),
    },
    "prefill": {"case": ("unequal",)},
    "scores": {"pass": ("forward",), "mask": ("causal",), "head_dim": ("128",)},
    "selection-speed": {
        "tokens": ("65536",),
        "mask": ("causal",),
        "call": (
            "dense attention", "block_mass", "pooled", "pooled, and attention", "antidiagonal, stride 16", "random",
            "oracle", "oracle, and attention",
        ),
    },
    "selector-shootout": {"data": ("minilm",)},
    "selector-shootout-gpu": {"data": ("minilm", "columns")},
    "simt-speed": {"measure": ("forward", "backward", "backward, deterministic"), "head_dim": ("128",)},
    "sparse-gpu": {"density": ("0.125", "0.500")},
    "sparse-speed": {"seqlen": ("8192",), "block": ("128",)},
    "torch-calls": {"GPU": ("NVIDIA H200",), "mask": ("causal",)},
}  # fmt: skip
TABLE = re.compile(r"^\|.*(?:\n\|.*)*", re.MULTILINE)


def folded(name: str, text: str) -> str:
    """Return the text of a table with the visible rows of each long table, and all its rows in a fold below."""
    return TABLE.sub(lambda table: _folded(name, table[0]), text)


def _folded(name: str, table: str) -> str:
    header, line, *rows = table.split("\n")
    if len(rows) <= LONG:
        return table
    shown = [row for row in rows if _is_shown(SHOWN.get(name), _cells(header), _cells(row))]
    if len(shown) > MOST_SHOWN:
        raise ValueError(f"{name} shows {len(shown)} of {len(rows)} rows; at most {MOST_SHOWN}: name fewer in SHOWN")
    whole = f"<details>\n<summary>All {len(rows)} rows</summary>\n\n{table}\n\n</details>"
    return "\n\n".join(["\n".join([header, line, *shown]), whole]) if shown else whole


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def _is_shown(wanted: dict[str, tuple[str, ...]] | None, columns: list[str], cells: list[str]) -> bool:
    values = dict(zip(columns, cells, strict=True))
    return wanted is not None and all(values[column] in some for column, some in wanted.items())
