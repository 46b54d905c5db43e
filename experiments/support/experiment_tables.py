"""Tables of docs/experiments.md and docs/fp8.md, from results of experiments on sparsity, memory, training and FP8."""

from collections.abc import Callable

from block_sparsity import pays_below
from peer_tables import markdown

Row = dict[str, str]
# Selectors for comparison: the best possible recall, and those that every selector should exceed.
BOUNDS = ("oracle", "local", "random")


def number(row: Row, name: str, form: str = ".3g") -> str:
    """Format a cell; empty if the row lacks the measurement."""
    return format(float(row[name]), form) if row.get(name) else ""


def shootout(rows: list[Row]) -> str:
    """Tabulate recall and errors by selector and number of blocks per row, one table per length and block size."""
    parts = []
    for sizes, group in by_sizes(rows).items():
        budgets = sorted({row["top_k"] for row in group}, key=int)
        lines = []
        for data, name in dict.fromkeys((row["data"], row["selector"]) for row in group):
            row_of = {row["top_k"]: row for row in group if (row["data"], row["selector"]) == (data, name)}
            cells = (
                f"{number(row_of[k], 'recall', '.2f')} ({number(row_of[k], 'error', '.2f')}, "
                f"{number(row_of[k], 'gradient_error', '.2f')})"
                for k in budgets
            )
            last = row_of[budgets[-1]]
            times = (number(last, f"{call}_ms", ".2g") for call in ("select", "attention", "both", "dense"))
            lines.append([data, name, *cells, *times])
        header = ["data", "selector", *(f"{budget} blocks a row" for budget in budgets)]
        shown = markdown([*header, "ms to select", "ms of attention", "ms of both", "ms of dense"], lines)
        parts.append(f"{sizes}:\n\n{shown}")
    return "\n\n".join(parts)


def chosen_recall(rows: list[Row]) -> str:
    """Tabulate recall and errors by the number of queries that share a choice, and the distinct blocks of neighbors."""
    queries = sorted({row["rows"] for row in rows}, key=int)
    counts = [name.removeprefix("distinct_") for name in rows[0] if name.startswith("distinct_")]
    lines = []
    for key in dict.fromkeys((row["data"], row["n"], row["selector"]) for row in rows):
        row_of = {row["rows"]: row for row in rows if (row["data"], row["n"], row["selector"]) == key}
        cells = (
            f"{number(row_of[each], 'recall', '.3f')} ({number(row_of[each], 'error', '.2f')}, "
            f"{number(row_of[each], 'gradient_error', '.2f')})" if each in row_of else "" for each in queries
        )  # fmt: skip
        distinct = (number(row_of.get("1", {}), f"distinct_{count}", ".2f") for count in counts)
        lines.append([*key, *cells, *distinct])
    header = ["data", "blocks", "selector", *(f"rows of {each}" for each in queries)]
    return markdown([*header, *(f"blocks of {count} queries" for count in counts)], lines)


def chosen_speed(rows: list[Row]) -> str:
    """Tabulate forward and backward times of lists per query by case and library, then host times and absences."""
    columns = "seqlen", "group", "chosen", "regime"
    ms = {(*(row[name] for name in columns), row["way"], row["pass"]): row for row in rows if row["ms"]}
    ways = list(dict.fromkeys(key[-2] for key in ms))
    lines = []
    for case in dict.fromkeys(key[:4] for key in ms):
        times = (
            " / ".join(number(ms.get((*case, way, which), {}), "ms", ".3g") for which in ("forward", "backward"))
            if (*case, way, "forward") in ms else "" for way in ways
        )  # fmt: skip
        lines.append([*case, number(ms[*case, ways[0], "forward"], "distinct", ".2f"), *times])
    parts = [markdown(["tokens", "group", "blocks", "choice", "distinct blocks", *ways], lines)]
    of_host = [f"{number(row, 'host_us', '.0f')} us for {row['pass']}" for row in rows if row["way"] == "host"]
    if of_host:
        parts.append(f"The host takes {' and '.join(of_host)}.")
    if absent := {row["way"]: row["note"] for row in rows if row["note"]}:
        parts.append("Cases without a time: " + "; ".join(f"{way} ({note})" for way, note in absent.items()) + ".")
    return "\n\n".join(parts)


def nsa_layer(rows: list[Row]) -> str:
    """Tabulate losses, the time of a step, and the differences of the layer's gradients."""
    forms = {"loss": ".3f", "held_out_loss": ".3f", "ms_per_step": ".0f"}
    forms |= {"difference": ".1e", "autograd_difference": ".1e"}
    lines = ([row["attention"], *(number(row, name, form) for name, form in forms.items())] for row in rows)
    header = ["attention", "loss", "held-out loss", "ms a step", "gradients and quotients", "gradients and autograd"]
    return markdown(header, lines)


def by_sizes(rows: list[Row]) -> dict[str, list[Row]]:
    """Group the selector rows by (sequence length, block size); the rows of a group share the same budgets."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['seqlen']} tokens, blocks of {row['block']}", []).append(row)
    return groups


def unbeaten(rows: list[Row]) -> str:
    """Tabulate the selectors that recall no more than random blocks or local blocks, by data and budget."""
    parts = []
    for sizes, group in by_sizes(rows).items():
        recalls = {(row["data"], row["selector"], row["top_k"]): float(row["recall"]) for row in group}
        budgets, lines = sorted({row["top_k"] for row in group}, key=int), []
        for data, name in dict.fromkeys((row["data"], row["selector"]) for row in group):
            if name in BOUNDS:
                continue
            cells = []
            for budget in budgets:
                own = recalls[data, name, budget]
                ahead = {bound: recalls[data, bound, budget] for bound in BOUNDS[1:]}
                leaders = [f"{bound} {share:.4f}" for bound, share in ahead.items() if own <= share]
                cells.append(f"{own:.4f}; {', '.join(leaders)}" if leaders else "")
            if any(cells):
                lines.append([data, name, *cells])
        header = ["data", "selector", *(f"{budget} blocks a row" for budget in budgets)]
        many = len({(row["data"], row["selector"]) for row in group if row["selector"] not in BOUNDS})
        parts.append(f"{sizes}: {many - len(lines)} of {many} selectors and data recall more at every budget.")
        if lines:
            parts[-1] += f" The others:\n\n{markdown(header, lines)}"
    return "\n\n".join(parts)


def crossover(rows: list[Row]) -> str:
    """Tabulate the density below which block-sparse attention is faster than dense attention."""
    lines = []
    for case in dict.fromkeys((row["pass"], row["seqlen"], row["block"]) for row in rows):
        matching = [row for row in rows if (row["pass"], row["seqlen"], row["block"]) == case]
        least, wins = float(matching[0]["density"]), matching[0]["crossover"]
        ratios = {f"{float(row['density']):.3g}": number(row, "of_dense", ".2f") for row in matching}
        lines.append([*case, *ratios.values(), pays_below(float(wins) if wins else None, least)])
        names = list(ratios)
    return markdown(["pass", "tokens", "block", *(f"at {name}" for name in names), "faster below"], lines)


def zoo(rows: list[Row]) -> str:
    """Tabulate the elements and the mass that patterns keep, the largest mass first."""
    order = sorted(rows, key=lambda row: -float(row["mass"]))
    names = ("kept", "mass", "output_error")
    lines = ([f"`{row['pattern']}`", *(number(row, name, ".2f") for name in names)] for row in order)
    return markdown(["pattern", "elements kept", "mass kept", "error of the output"], lines)


def ladder(rows: list[Row]) -> str:
    """Tabulate time, rate and memory of every kernel at the longest length."""
    longest = max(rows, key=lambda row: int(row["seqlen"]))["seqlen"]
    names = {"ms": ".3g", "tflops": ".3g", "peak_mib": ".3g"}
    lines = (
        [row["mask"], row["pass"], row["kernel"], row["seqlen"], *(number(row, *each) for each in names.items())]
        for row in rows
        if row["seqlen"] == longest
    )
    return markdown(["mask", "pass", "kernel", "tokens", "ms", "TFLOP/s", "peak MiB"], lines)


def language(rows: list[Row]) -> str:
    """Tabulate the losses of each attention in a training, with times and memory."""
    names = {"step": "", "loss": ".4f", "held_out_loss": ".4f", "gap": ".1e", "bound": ".1e", "density": ".2f"}
    names |= {"tokens_per_s": ".3g", "peak_mib": ".3g", "longest_context": ""}
    lines = (
        [row["attention"], *(number(row, name, form) if form else row.get(name, "") for name, form in names.items())]
        for row in rows
        if row["part"] == "run"
    )
    header = ["attention", "steps", "loss", "held-out loss", "gap to naive", "bound", "density"]
    return markdown([*header, "tokens/s", "peak MiB", "longest context"], lines)


def language_long(rows: list[Row]) -> str:
    """Tabulate training steps of GPT-2 small's layers, and their speed-up over naive attention at two lengths."""
    names = {"ms": ".3g", "tokens_per_s": ".3g", "speedup": ".2f"}
    shortest = min(int(row["context"]) for row in rows)
    (naive,) = (row for row in rows if (row["attention"], row["context"]) == ("naive", str(shortest)))
    lines = []
    for row in rows:
        rate = float(row["tokens_per_s"]) if row["tokens_per_s"] else None
        over = "" if rate is None else f"{rate / float(naive['tokens_per_s']):.2f}"
        cells = [*(number(row, *each) for each in names.items()), over, number(row, "published_speedup", ".2g")]
        lines.append([row["attention"], row["context"], row["batch"], *cells, number(row, "peak_mib"), row["note"]])
    header = ["attention", "context", "batch", "ms a step", "tokens/s", "speed-up over naive"]
    return markdown([*header, f"over naive at {shortest}", "FlashAttention's paper", "peak MiB", "note"], lines)


def long_range(rows: list[Row]) -> str:
    """Tabulate the share of right answers of every seed."""
    seeds = sorted({row["seed"] for row in rows}, key=int)
    lines = []
    for case in dict.fromkeys((row["pattern"], row["seqlen"]) for row in rows):
        row_of = {row["seed"]: row for row in rows if (row["pattern"], row["seqlen"]) == case}
        first = next(iter(row_of.values()))
        shares = (number(row_of.get(seed, {}), "accuracy", ".3f") for seed in seeds)
        lines.append([*case, number(first, "density", ".2f"), *shares, number(first, "seconds", ".0f")])
    return markdown(["pattern", "tokens", "density", *(f"seed {seed}" for seed in seeds), "seconds of a seed"], lines)


def errors(rows: list[Row]) -> str:
    """Tabulate errors of attention against float64 at the longest length."""
    longest = max((row["seqlen"] for row in rows), key=int)
    names = ("rounding", "tiled", "plain")
    lines = (
        [row["dtype"], row["seqlen"], row["logit_std"], row["outliers"]] + [number(row, name, ".2g") for name in names]
        for row in rows
        if row["seqlen"] == longest
    )
    header = ["dtype", "tokens", "logits' deviation", "outliers", "rounding alone", "tiled", "plain"]
    return markdown(header, lines)


def overhead(rows: list[Row]) -> str:
    """Tabulate the overhead of sweeps relative to their tasks."""
    lines = (
        [row["engine"], row["tasks"], row["workers"], number(row, "task_s"), number(row, "seconds", ".4g")]
        + [number(row, name, form) for name, form in {"overhead": ".2%", "cpu_s": ".3g", "cpu_overhead": ".2%"}.items()]
        for row in rows
    )
    header = ["engine", "tasks", "at once", "s of a task", "s of the sweep", "overhead", "CPU s", "overhead by CPU"]
    return markdown(header, lines)


def fp8_speed(rows: list[Row]) -> str:
    """Tabulate the times of our FP8 attention, of cuDNN's, and of our own attention in bfloat16."""
    lines = (
        [row["mask"], row["seqlen"], row["head_dim"], number(row, "ms"), number(row, "tflops", ".0f")]
        + [number(row, "of_cudnn", ".2f"), number(row, "of_bfloat16", ".2f"), number(row, "prepare_share", ".0%")]
        + [number(row, "error", ".3f")]
        for row in rows
    )
    header = ["mask", "tokens", "columns", "ms", "TFLOP/s", "of cuDNN", "of bfloat16", "preparation", "error / bound"]
    return markdown(header, lines)


def fp8_error(rows: list[Row]) -> str:
    """Tabulate FP8 errors by method, and the factor by which each reduces the error of one scale per tensor."""
    cases = list(dict.fromkeys((row["distribution"], row["head_dim"], row["seqlen"]) for row in rows))
    lines = []
    for per, rotated in dict.fromkeys((row["per"], row["rotated"]) for row in rows):
        row_of = {
            (row["distribution"], row["head_dim"], row["seqlen"]): row
            for row in rows
            if (row["per"], row["rotated"]) == (per, rotated)
        }
        ratios = (f" ({number(row_of[case], 'ratio', '.2f')})" * bool(per) for case in cases)
        cells = [number(row_of[case], "rmse", ".2e") + ratio for case, ratio in zip(cases, ratios)]
        method = f"a scale for each {per}" + ", q and k rotated" * (rotated == "True") if per else "float16"
        lines.append([method, *cells])
    header = [f"{name}, {columns} columns, {length} rows" for name, columns, length in cases]
    return markdown(["quantised with", *header], lines)


def exponentials(rows: list[Row]) -> str:
    """Tabulate exponentials per multiprocessor and cycle."""
    header = ["instruction", "results at once", "results in a cycle"]
    lines = [[f"`{row['instruction']}`", row["results_at_once"], number(row, "per_cycle", ".1f")] for row in rows]
    return markdown(header, lines)


def code_structure(rows: list[Row]) -> str:
    """Tabulate the counts of code that have goals, the largest module and class, kernels and planted faults."""
    paths = "modules of a call", "hand-overs of a call", "functions of a call"
    first = {row["measure"]: row for row in reversed(rows) if row["measure"].startswith("largest")}
    counts = {(row["measure"], row["part"]): row for row in rows}
    lines = [
        [row["measure"], row["part"], *(row[name] for name in ("value", "before", "goal"))]
        for row in rows
        if first.get(row["measure"], row) is row and row["measure"] not in paths
        and (row["goal"] or row["measure"] == "planted faults" or row["part"] == "kernels_cu")
    ]  # fmt: skip
    for call in dict.fromkeys(row["part"] for row in rows if row["measure"] in paths):
        three = [counts[path, call] for path in paths]
        cells = (" / ".join(row[name] or "-" for row in three) for name in ("value", "before", "goal"))
        lines.append(["modules / hand-overs / functions", call, *cells])
    return markdown(["count", "of", "now", "before", "goal"], lines)


TABLES: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "code-structure": ("code_structure", code_structure),
    "fp8-speed": ("speed_fp8", fp8_speed),
    "fp8-error": ("fp8_error", fp8_error),
    "fp8-error-gpu": ("fp8_error_gpu", fp8_error),
    "exponential-rate": ("exponential_rate", exponentials),
    "selector-shootout": ("selector_shootout", shootout),
    "selectors-unbeaten": ("selector_shootout", unbeaten),
    "selector-shootout-gpu": ("selector_shootout_gpu", shootout),
    "selectors-unbeaten-gpu": ("selector_shootout_gpu", unbeaten),
    "chosen-recall": ("chosen_recall", chosen_recall),
    "chosen-speed": ("chosen_speed", chosen_speed),
    "nsa-layer": ("nsa_layer", nsa_layer),
    "crossover": ("crossover", crossover),
    "crossover-gpu": ("crossover_gpu", crossover),
    "pattern-zoo": ("pattern_zoo", zoo),
    "flash-ladder": ("flash_ladder", ladder),
    "language-model": ("train_language_model", language),
    "language-model-gpu": ("train_language_model_gpu", language),
    "language-model-long": ("train_language_model_long", language_long),
    "long-range": ("long_range", long_range),
    "long-range-gpu": ("long_range_gpu", long_range),
    "numerical-error": ("numerical_error", errors),
    "numerical-error-gpu": ("numerical_error_gpu", errors),
    "sweep-overhead": ("sweep_overhead", overhead),
}
