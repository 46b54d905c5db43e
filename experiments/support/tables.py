"""Tables of results in the README and in docs/, written from results/*.csv, and plots against peers.

    python -m experiments tables            # rewrite the tables, and draw the plots
    python -m experiments tables --check    # fail if a page's tables do not match the results

A table in a page is between `<!-- table:NAME -->` and `<!-- /table -->`; NAME is one of `TABLES`. If there is no result
yet, the page says so. Only rows of committed source trees are shown, and no line combines commits (published.py).

Cost: Seconds on one core.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import experiment_tables
from experiment_tables import number
from folding import folded
import peer_tables
from block_sparsity import pays_below
from command_line import Parser
from harness import RESULTS, atomic_path, read_csv
from peer_tables import markdown
from published import committed, left_out, of_one_commit
from speed_vs_peers import plot

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
Row = dict[str, str]


def signature(rows: list[Row]) -> str:
    """Describe the machines on which a table's rows were measured; rows of several runs may have several."""
    return "  \n".join(dict.fromkeys(map(_measured_on, rows)))


def _measured_on(row: Row) -> str:
    place = f"{row['cpu']}, {row['cores']} cores" + ("" if row["gpu"] == "none" else f", {row['gpu']}")
    versions = f"Python {row['python']}, NumPy {row['numpy']}, {row['blas']}"
    return f"*{place}; {versions}; commit {row['commit']}, {row['date']}.*"


def recall(rows: list[Row]) -> str:
    """Tabulate the softmax mass kept, by pattern and budget, with the pattern's density in parentheses."""
    rows = [row for row in rows if row["part"] == "recall" and row["block"] == rows[0]["block"]]
    budgets = sorted({row["budget"] for row in rows if row["budget"]}, key=float)
    cells = {
        (row["pattern"], row["budget"]): f"{number(row, 'recall', '.2f')} ({number(row, 'density', '.2f')})"
        for row in rows
    }
    names = dict.fromkeys(row["pattern"] for row in rows)
    for name in names:
        of_one_commit([row for row in rows if row["pattern"] == name], name)
    header = ["pattern", *(f"at most {budget}" for budget in budgets)]
    return markdown(header, ([name, *(cells.get((name, budget), "") for budget in budgets)] for name in names))


def sparse_speed(rows: list[Row]) -> str:
    """Tabulate the time of block-sparse attention relative to dense attention."""
    forms = {"density": ".2f", "forward_ms": ".0f", "forward_speedup": ".2f"}
    forms |= {"backward_ms": ".0f", "backward_speedup": ".2f"}
    header = ["pattern", "seqlen", "block", "density", "forward ms", "speed-up", "backward ms", "speed-up"]
    return markdown(
        header,
        (
            [row["pattern"], row["seqlen"], row["block"], *(number(row, *cell) for cell in forms.items())]
            for row in rows
            if row["part"] == "speed"
        ),
    )


def cpu_speed(rows: list[Row]) -> str:
    """Tabulate the cpu executor's times and memory."""
    header = ["measure", "seqlen", "density", "ms", "MiB", "ratio", "of what"]
    return markdown(
        header,
        (
            [row["measure"], row["seqlen"], *(number(row, name) for name in ("density", "ms", "mib", "ratio"))]
            + [row["ratio_of"]]
            for row in rows
        ),
    )


def cpu_against_torch(rows: list[Row]) -> str:
    """Tabulate the cpu executor's speed relative to PyTorch's, by length and pass."""
    passes = "forward", "forward, causal", "backward", "backward, causal"
    paired = [row for row in rows if row["measure"].endswith(", paired")]
    speed = {(row["measure"], row["seqlen"]): number(row, "ratio") for row in paired}
    lengths = list(dict.fromkeys(seqlen for _, seqlen in speed))
    return markdown(
        ["seqlen", *passes], ([seqlen, *(speed[f"{name}, paired", seqlen] for name in passes)] for seqlen in lengths)
    )


def mask_compile(rows: list[Row]) -> str:
    """Tabulate the compilation of masks on the host."""
    numbers = ("ms", "peak_mib", "kept_mib")
    header = ["mask", "seqlen", "made", "ms", "peak MiB", "kept MiB"]
    return markdown(
        header, ([row["mask"], row["seqlen"], row["made"], *(number(row, name) for name in numbers)] for row in rows)
    )


def soak(rows: list[Row]) -> str:
    """Tabulate the largest ratio of an error to its bound, by executor, dtype and kernel family."""
    names = ("executor", "dtype", "family", "examples", "outside", "specifications", "rare")
    outputs = ("o", "lse", "dq", "dk", "dv", "captured", "dsink")
    return markdown(
        [*names, *outputs],
        (
            [*(row.get(name, "") for name in names), *(number(row, name, ".3f") for name in outputs)]
            for row in rows if row["feature"] == "any"
        ),
    )  # fmt: skip


def simt_speed(rows: list[Row]) -> str:
    """Tabulate rates of the simt kernels, block-sparse calls, and the overhead of a call."""
    names = ("head_dim", "density", "ms", "tflops", "ratio", "us", "mib")
    header = ["measure", "dtype", "seqlen", "head_dim", "density", "ms", "TFLOP/s", "ratio", "us", "MiB"]
    return markdown(
        header,
        (
            [row["measure"], row["dtype"], row["seqlen"], *(number(row, name) for name in names)]
            for row in rows
            if not row["measure"].startswith("compile")
        ),
    )


def sim_against_gpu(rows: list[Row]) -> str:
    """Tabulate the largest difference between the simulator and the GPU, divided by their error bound."""
    outputs = ("o", "lse", "dq", "dk", "dv")
    lines = []
    for kernel, dtype in dict.fromkeys((row["kernel"], row["dtype"]) for row in rows):
        cases = [row for row in rows if (row["kernel"], row["dtype"]) == (kernel, dtype)]
        of_one_commit(cases, f"{kernel} {dtype}")
        shares = (f"{max(float(row[name]) for row in cases):.3f}" for name in outputs)
        same = sum(row["probes_same_bits"] == "True" for row in cases)
        lines.append([kernel, dtype, str(len(cases)), *shares, f"{same} of {len(cases)}"])
    return markdown(["kernel", "dtype", "cases", *outputs, "probes bit-equal"], lines)


def simulator_speed(rows: list[Row]) -> str:
    """Tabulate the simulator's build, calls and schedules."""
    header = ["measure", "kernel", "seqlen", "head_dim", "ms", "runs", "false reports", "runs with other bits"]
    counts = ("runs", "reports", "other_bits")
    return markdown(
        header,
        (
            [*(row[name] for name in ("measure", "kernel", "seqlen", "head_dim")), number(row, "ms")]
            + [row[name] for name in counts]
            for row in rows
        ),
    )


def sparse_gpu(rows: list[Row]) -> str:
    """Tabulate the times of block-sparse calls on a GPU, relative to the dense call, and the break-even density."""
    ways = ("forward", "backward")
    header = ["seqlen", "block", "kernel", "density"]
    header += [f"{way} {name}" for way in ways for name in ("ms", "speed-up", "TFLOP/s", "pays below")]
    lines = []
    for row in rows:
        cells = [row["seqlen"], row["block"], row["kernel"], number(row, "density", ".3f")]
        for way in ways:
            forms = {f"{way}_ms": ".3g", f"{way}_speedup": ".2f", f"{way}_tflops": ".0f"}
            cells += [number(row, *cell) for cell in forms.items()]
            pays = row[f"{way}_break_even"]
            cells.append(pays_below(float(pays) if pays else None, min(float(other["density"]) for other in rows)))
        lines.append(cells)
    return markdown(header, lines)


def decode(rows: list[Row]) -> str:
    """Tabulate decode steps from a cache, compared with other libraries."""
    header = ["sequences", "keys of each", "library", "call", "us", "GB/s"]
    lines = [
        [row["batch"], row["keys"], row["library"], row["operation"], number(row, "us"), number(row, "gb_per_s", ".0f")]
        for row in rows
        if not row["operation"].endswith("host")
    ]
    return f"{markdown(header, lines)}\n\n{of_gpu(rows)}"


def host_time(rows: list[Row]) -> str:
    """Tabulate the host time of a warm call, by kind of arrays and mask, for the shortest calls timed."""
    tokens = min((row["tokens"] for row in rows if int(row["tokens"])), key=int)
    chosen = [row for row in rows if row["tokens"] == tokens]
    libraries = list(dict.fromkeys(row["library"] for row in chosen))
    us = {(row["operation"], row["mask"], row["library"]): number(row, "us", ".0f") for row in chosen}
    calls = dict.fromkeys((row["operation"], row["mask"]) for row in chosen)
    lines = ([*call, *(us.get((*call, library), "") for library in libraries)] for call in calls)
    return f"{markdown(['call', 'mask', *libraries], lines)}\n\n{tokens} tokens. {of_gpu(rows)}"


def selection_speed(rows: list[Row]) -> str:
    """Tabulate block masses and selections relative to dense attention, and the host time of a call."""
    header = ["tokens", "mask", "call", "density", "ms", "of dense attention", "us on the host"]
    lines = (
        [row["seqlen"], "causal" if row["causal"] == "True" else "none", row["call"], number(row, "density", ".2f")]
        + [number(row, "ms"), number(row, "of_dense", ".3f"), number(row, "us", ".0f")]
        for row in rows
    )
    return f"{markdown(header, lines)}\n\n{rows[0]['num_heads']} heads of {rows[0]['head_dim']}. {of_gpu(rows)}"


def scaling(rows: list[Row]) -> str:
    """Tabulate the times of attention on several ranks, measured or expected, relative to one rank."""
    header = ["row", "mask", "tokens", "heads", "pass", "ranks", "GPUs", "method", "one rank, ms", "ranks, ms"]
    lines = (
        [row["kind"], row["mask"], row["seqlen"], f"{row['num_heads']} / {row['num_kv_heads']}", row["pass"]]
        + [row["ranks"], row["gpus"], row["method"], number(row, "one_ms"), number(row, "ranks_ms")]
        + [number(row, "linear", ".2f")]
        for row in rows
    )
    return markdown([*header, "of linear"], lines)


def beside_plain(rows: list[Row]) -> str:
    """Tabulate the time of plain attention divided by that with scores, sinks or dropout; for scores, also peers."""
    first = "score" if "score" in rows[0] else "p"
    header = [first, "mask", "pass", "kernel", "head_dim", "ms", "TFLOP/s", "of plain"]
    lines = [
        [number(row, "p") if first == "p" else row["score"], row["mask"], row["pass"], row["kernel"], row["head_dim"]]
        + [number(row, "ms"), number(row, "tflops", ".0f"), number(row, "of_plain", ".2f")]
        for row in rows
    ]
    if first == "score":
        header += ["peer", "peer / ours"]
        for line, row in zip(lines, rows, strict=True):
            line += [row["best_peer"] if row["ratio"] else "", number(row, "ratio", ".2f")]
    return f"{markdown(header, lines)}\n\n{rows[0]['seqlen']} tokens, {rows[0]['num_heads']} heads. {of_gpu(rows)}"


def torch_calls(rows: list[Row]) -> str:
    """Tabulate repeated PyTorch calls, compared with other libraries."""
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    calls: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        named = tuple(row[name] for name in ("pass", "mask", "tokens", "head_dim", "batch", "heads", "gpu"))
        calls.setdefault(named, {})[row["library"]] = row
    lines = []
    for call, by_library in calls.items():
        of_one_commit(list(by_library.values()), " ".join(call))
        us = [number(by_library.get(library, {}), "us", ".0f") for library in libraries]
        lines.append([*call, *us, number(by_library["cuflash"], "of_best", ".2f")])
    header = ["pass", "mask", "tokens", "head_dim", "batch", "heads", "GPU"]
    header += [*(f"{name}, us" for name in libraries), "lead"]
    return f"{markdown(header, lines)}\n\n{of_gpu(rows)}"


def training_step(rows: list[Row]) -> str:
    """Tabulate training steps of a Llama model with PyTorch's attention and with ours."""
    header = ["tokens", "sequences", "attention", "ms", "of PyTorch's", "error of gradients"]
    lines = (
        [row["tokens"], row["batch"], row["attention"], number(row, "ms", ".1f"), number(row, "of_sdpa", ".2f")]
        + [number(row, "gradient_error", ".3f")]
        for row in rows
    )
    return f"{markdown(header, lines)}\n\n{of_gpu(rows)}"


_CHUNKS = ("chunks", "unequal")  # cases of chunked_prefill.py, with rows in the file of packed.py


def packed(rows: list[Row]) -> str:
    """Tabulate packed sequences and windows, compared with other libraries."""
    return of_libraries([row for row in rows if row["case"] not in _CHUNKS])


def prefill(rows: list[Row]) -> str:
    """Tabulate prefill chunks on caches, compared with packed sequences and other libraries."""
    return of_libraries([row for row in rows if row["case"] in _CHUNKS])


def of_libraries(rows: list[Row]) -> str:
    """Return times by case, pass and library, with the ratio of the fastest other library's time to the row's own."""
    if not rows:
        return "*Not measured yet.*"
    header = ["case", "pass", "library", "ms", "TFLOP/s", "fastest other / own", "host us"]
    lines = (
        [row["case"], row["pass"], row["library"], number(row, "ms"), number(row, "tflops", ".0f")]
        + [number(row, "ratio", ".2f"), number(row, "host_us", ".0f")]
        for row in rows
        if row["ms"]
    )
    return f"{markdown(header, lines)}\n\n{of_gpu(rows)}"


def flash_ladder_gpu(rows: list[Row]) -> str:
    """Tabulate the kernel families on full attention, in the order of the papers' steps."""
    header = ["pass", "tokens", "kernel", "ms", "TFLOP/s", "share of peak", "peak MiB", "MB moved, by the model"]
    forms = {"ms": ".3g", "tflops": ".3g", "share_of_peak": ".2f", "peak_mib": ".4g", "moved_mb": ".4g"}
    chosen = sorted((row for row in rows if row["mask"] == "full"), key=lambda row: (row["pass"], int(row["seqlen"])))
    lines = (
        [row["pass"], row["seqlen"], row["kernel"], *(number(row, *cell) for cell in forms.items())] for row in chosen
    )
    return f"{markdown(header, lines)}\n\n{of_gpu(rows)}"


def flashattention1(rows: list[Row]) -> str:
    """Tabulate the cases of FlashAttention-1's appendix with our kernels, and the paper's own numbers."""
    header = ["pass", "tokens", "method", "density", "ms", "paper's ms, A100", "over standard", "paper's"]
    forms = {"density": ".3f", "ms": ".3g", "paper_ms": ".3g", "over_standard": ".3g", "paper_over_standard": ".3g"}
    header += ["MiB of both passes", "paper's MB"]
    forms |= {"memory_mib": ".4g", "paper_memory_mb": ".4g"}
    chosen = sorted(rows, key=lambda row: (("forward", "backward", "both").index(row["pass"]), int(row["seqlen"])))
    lines = (
        [row["pass"], row["seqlen"], row["method"], *(number(row, *cell) for cell in forms.items())] for row in chosen
    )
    return f"{markdown(header, lines)}\n\n{of_gpu(rows)}"


def memory_traffic(rows: list[Row]) -> str:
    """Tabulate the device-memory traffic by the papers' model and by the profiler's counters."""
    header = ["pass", "kernel", "tokens", "MB by the model", "MB by counters", "counters / model"]
    forms = {"model_mb": ".4g", "measured_mb": ".4g", "measured_over_model": ".2f"}
    chosen = sorted(rows, key=lambda row: (row["pass"] != "forward", row["kernel"], int(row["seqlen"])))
    lines = (
        [row["pass"], row["kernel"], row["seqlen"], *(number(row, *cell) for cell in forms.items())] for row in chosen
    )
    return f"{markdown(header, lines)}\n\n{of_gpu(rows)}"


def of_gpu(rows: list[Row]) -> str:
    """Return the GPU, commit and date of rows, one line for each."""
    return "  \n".join(dict.fromkeys(f"*{row['gpu']}; commit {row['commit']}, {row['date']}.*" for row in rows))


TABLES: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "recall": ("block_sparsity", recall),
    "sparse-speed": ("block_sparsity", sparse_speed),
    "cpu-speed": ("cpu_speed", cpu_speed),
    "cpu-against-torch": ("cpu_speed", cpu_against_torch),
    "mask-compile": ("mask_compile", mask_compile),
    "simt-speed": ("simt_speed", simt_speed),
    "sparse-gpu": ("block_sparsity_gpu", sparse_gpu),
    "speed-vs-peers": ("speed_vs_peers", peer_tables.tables),
    "peers-lead": ("speed_vs_peers", peer_tables.lead),
    "beside-flash-attention-3": ("speed_vs_peers", peer_tables.beside_flash_attention_3),  # codespell:ignore
    "simulator-speed": ("simulator_speed", simulator_speed),
    "sim-against-gpu": ("sim_against_gpu", sim_against_gpu),
    "soak": ("soak", soak),
    "decode": ("decode", decode),
    "host-time": ("host_time", host_time),
    "torch-calls": ("torch_calls", torch_calls),
    "training-step": ("training_step", training_step),
    "scaling": ("scaling", scaling),
    "scaling-gpu": ("scaling_gpu", scaling),
    "scores": ("score_functions", beside_plain),
    "dropout": ("dropout", beside_plain),
    "flash-ladder-gpu": ("flash_ladder_gpu", flash_ladder_gpu),
    "flashattention1": ("flashattention1_tables_gpu", flashattention1),
    "memory-traffic": ("memory_traffic_gpu", memory_traffic),
    "packed": ("packed", packed),
    "prefill": ("packed", prefill),
    **experiment_tables.TABLES,
    "selection-speed": ("selection_speed", selection_speed),
}


# Tables that select their own rows, and print their commits.
OF_PEERS = ("speed-vs-peers", "peers-lead", "beside-flash-attention-3")  # codespell:ignore
CHOOSING = (
    *OF_PEERS, "decode", "host-time", "torch-calls", "training-step", "scores", "dropout", "packed", "prefill",
    "selection-speed",
    "flash-ladder-gpu", "flashattention1", "memory-traffic",
)  # fmt: skip


def written(text: str, results: Path = RESULTS) -> str:
    """Return the page with all marked tables rewritten."""

    def table(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"the page marks a table {name!r}; there are only {', '.join(TABLES)}")
        source, make = TABLES[name]
        rows = read_csv(results / f"{source}.csv") if (results / f"{source}.csv").exists() else []
        if not rows:
            return f"{begin}\n*Not measured yet.*\n\n{end}"
        if name in CHOOSING:
            return f"{begin}\n{folded(name, make(committed(rows) if name not in OF_PEERS else rows))}\n\n{end}"
        chosen = committed(rows)
        absent = ["*There is no row of a committed tree.*"]
        parts = [folded(name, make(chosen)), signature(chosen)] if chosen else absent
        return f"{begin}\n" + "\n\n".join([*parts, *filter(None, [left_out(rows)])]) + f"\n\n{end}"

    return MARKED.sub(table, text)


def update(page: Path, results: Path, *, check: bool) -> None:
    """Rewrite the page's tables; with `check`, change nothing and exit if they are stale."""
    old = page.read_text(encoding="utf-8")
    new = written(old, results)
    if check and new != old:
        sys.exit(f"{page.name} does not show what experiments/results says: run python -m experiments tables")
    if new != old:
        with atomic_path(page) as partial:
            partial.write_text(new, encoding="utf-8")


def draw_plots(results: Path) -> None:
    """Draw the plots that appear with the tables of peers."""
    source = results / "speed_vs_peers.csv"
    rows = read_csv(source) if source.exists() else []
    figures = {
        peer_tables.plot_name(request): plot(chosen.rows) for request, chosen in peer_tables.published(rows).items()
    }
    if rows:
        figures[peer_tables.LEAD_PLOT] = peer_tables.lead_plot(rows)
    for name, figure in figures.items():
        if figure is not None:
            with atomic_path(results / name) as partial:
                figure.savefig(partial, dpi=80, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    is_check = parser.parse_args().check
    for page in PAGES:
        update(page, RESULTS, check=is_check)
    if not is_check:
        draw_plots(RESULTS)
