"""Tables and plots of the results of speed_vs_peers: which rows are published, and which library leads.

A table shows the calls of one request on one GPU, in one dtype: `kernel="auto"`, or a kernel family by name. Rows of
runs that did not record a request are listed under the family that served them. In a table, all cases with the same
pass and kind of mask have rows of one commit.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from published import Chosen, committed, left_out, newest_fullest, of_one_commit
from speed_vs_peers import OURS, WAYS, leads, mask_kind, plot, summary


CASE = ("pass", "head_dim", "mask", "seqlen")
LEAD_PLOT = "peers_lead.png"
LEAD_DTYPE, LEAD_HEAD_DIM = "bfloat16", "128"
NAMES = {
    "sdpa_flash": "FlashAttention-2", "sdpa_cudnn": "cuDNN", "sdpa_efficient": "PyTorch's memory-efficient attention",
    "flash_attn": "FlashAttention-2", "flash_attn_3": "FlashAttention-3", "flash_attn_4": "FlashAttention-4",
    "flex": "FlexAttention",
}  # fmt: skip
Row = Mapping[str, Any]


class Request(NamedTuple):
    """The kind of calls that a table shows."""

    gpu: str
    dtype: str
    kernel: str  # requested family; empty if that was not recorded
    served: str  # family that the call used; empty if the request is known

    def __str__(self) -> str:
        how = f'kernel="{self.kernel}"' if self.kernel else f"served by {self.served}"
        return f"{self.gpu}, {self.dtype}, {how}"


def request_of(row: Row) -> Request:
    kernel = row.get("request") or ""
    return Request(row["gpu"], row["dtype"], kernel, "" if kernel else row["kernel"])


def grouped(rows: Iterable[Row], name: Any) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups


def published(rows: Iterable[Row]) -> dict[Request, Chosen]:
    """Return the rows of each request's table; for each pass and kind of mask, these are rows of one commit."""
    chosen_of = {}
    for request, group in grouped(rows, request_of).items():
        sets = grouped(group, lambda row: (row["pass"], mask_kind(row)))
        chosen = [newest_fullest(sets[name], CASE) for name in sorted(sets, reverse=True)]
        chosen_of[request] = Chosen(
            [row for each in chosen for row in each.rows], [case for each in chosen for case in each.missing]
        )
    return chosen_of


def tables(rows: Sequence[Row]) -> str:
    """Return, for each request, a sentence about the lead, a table of all cases, a plot, and the missing cases."""
    parts = []
    for request, chosen in published(rows).items():
        parts.append(f"#### {request}")
        if chosen.rows:
            header, lines = summary(chosen.rows)
            parts += [markdown(*lead_lines(chosen.rows)), f"TFLOP/s:\n\n{markdown(header, lines)}"]
            if plot(chosen.rows) is not None:
                parts.append(f"![TFLOP/s over length, {request}](../experiments/results/{plot_name(request)})")
            parts += [versions(chosen.rows), machines(chosen.rows)]
        if chosen.missing:
            cases = "; ".join(" ".join(case) for case in sorted(chosen.missing, key=_by_size))
            parts.append(f"*Missing, since no committed tree has measured them with the rest: {cases}.*")
    parts.append(left_out(rows))
    return "\n\n".join(filter(None, parts))


def beside_flash_attention_3(rows: Sequence[Row]) -> str:
    """Return all cases of the newest commit that were timed together with FlashAttention-3."""
    timed = [row for row in committed(rows) if row["peer"] == "flash_attn_3" and row.get("peer_ms")]
    if not timed:
        return "*Not measured yet.*"
    newest = max(timed, key=lambda row: row["date"])
    shown = [row for row in rows if (row["commit"], request_of(row)) == (newest["commit"], request_of(newest))]
    shown = [row for row in shown if row["head_dim"] == newest["head_dim"]]
    header, lines = summary(shown)
    return "\n\n".join([f"TFLOP/s:\n\n{markdown(header, lines)}", versions(shown), machines(shown)])


def _by_size(case: tuple[str, ...]) -> tuple[Any, ...]:
    way, head_dim, mask, seqlen = case
    return way, int(head_dim), mask, int(seqlen)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def lead_lines(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return header and cells: who leads in each pass and kind of mask, by how much, and the measured commit."""
    header = ["pass", "mask", "kernel", "cases", "best peer / ours, geometric mean", "least", "most"]
    header += [f"{OURS} is fastest in", "commit", "date"]
    lines = []
    for name, lead in leads(rows, set_of).items():
        first = of_one_commit([row for row in rows if set_of(row) == name], str(name))[0]
        ratios = [f"{ratio:.2f}" for ratio in (lead.mean, lead.least, lead.most)]
        cells = [first["pass"], mask_kind(first), first["kernel"], str(lead.num_cases), *ratios]
        lines.append([*cells, f"{lead.num_led} of {lead.num_cases}", first["commit"], first["date"]])
    return header, lines


def set_of(row: Row) -> tuple[str, str, str]:
    """Return the group of cases over which one mean is computed."""
    return row["kernel"], row["pass"], mask_kind(row)


def versions(rows: Sequence[Row]) -> str:
    names = ("torch", "cuda", "cudnn", "triton", "flash_attn", "flash_attn3_jax", "flash_attn_4", "cupy")
    built = (", ".join(f"{name} {row[name]}" for name in names if row.get(name)) for row in rows)
    return "; ".join(dict.fromkeys(built)) + "."


def machines(rows: Sequence[Row]) -> str:
    places = (f"{row['cpu']}, {row['cores']} cores, {row['gpu']}, driver for CUDA {_cuda(row)}" for row in rows)
    return "*" + "; ".join(dict.fromkeys(places)) + ".*"


def _cuda(row: Row) -> str:
    driver = int(row.get("driver") or 0)
    return f"{driver // 1000}.{driver % 1000 // 10}"


def plot_name(request: Request) -> str:
    words = (request.gpu, request.dtype, request.kernel or request.served)
    return "speed_vs_peers_" + "_".join(re.sub(r"[^a-z0-9]+", "-", word.lower()) for word in words) + ".png"


# The README's plot and sentence


def lead_rows(rows: Sequence[Row]) -> list[Row]:
    """Select the full and causal 16-bit cases of `kernel="auto"`, or of the family with the most timed peers.

    Of several GPUs with as many timed peers, the one that was measured last is selected.
    """
    requests = [
        [row for row in chosen.rows if mask_kind(row) in ("full", "causal") and row["dtype"] == LEAD_DTYPE]
        for chosen in published(rows).values()
    ]
    timed = [[row for row in of_request if row.get("ratio")] for of_request in requests]
    return max(timed, key=_rank_of_lead)


def _rank_of_lead(rows: Sequence[Row]) -> tuple[bool, int, str]:
    return bool(rows) and rows[0].get("request") == "auto", len(rows), max((row["date"] for row in rows), default="")


def lead(rows: Sequence[Row]) -> str:
    """Return a plot, and the sentence that summarizes it."""
    shown = lead_rows(rows)
    if not shown:
        return "*There is no row of a committed tree.*"
    request = request_of(shown[0])
    how = 'with `kernel="auto"`' if request.kernel == "auto" else f"with the {request.served or request.kernel} kernels"
    *others, last = dict.fromkeys(NAMES[row["peer"]] for row in shown)
    peers = f"the fastest of {', '.join(others)} and {last}" if others else last
    passes = [[row for row in shown if row["pass"] == way] for way in WAYS]
    text = (
        f"On an {request.gpu} in {request.dtype} {how}, over {_count(shown, 'head_dim')} head dimensions and "
        f"{_count(shown, 'seqlen')} lengths, full and causal, {peers} takes, in the geometric mean, "
        f"{'; '.join(map(_sentence, filter(None, passes)))}."
    )
    return f"![TFLOP/s of cuflash and other libraries over the length](experiments/results/{LEAD_PLOT})\n\n{text}"


def _count(rows: Sequence[Row], column: str) -> int:
    return len({row[column] for row in rows})


def _sentence(rows: Sequence[Row]) -> str:
    """Describe a pass in words: the mean, the range, and the number of cases in which cuflash is the fastest."""
    first = of_one_commit(rows, f"{rows[0]['pass']} of the README")[0]
    (lead,) = leads(rows, lambda row: row["pass"]).values()
    return (
        f"{lead.mean:.2f} times as long as cuflash in the {first['pass']} pass "
        f"({lead.least:.2f} to {lead.most:.2f}; cuflash is the fastest in {lead.num_led} of {lead.num_cases} cases;"
        f" commit {first['commit']}, {first['date']})"
    )


def lead_plot(rows: Sequence[Row]) -> Figure | None:
    """Plot TFLOP/s over length at one head_dim."""
    return plot([row for row in lead_rows(rows) if row["head_dim"] == LEAD_HEAD_DIM])
