"""FlashAttention-1's tables and the memory traffic at tiny sizes: rows, parsed output, and refused arguments."""

from __future__ import annotations

import itertools
from pathlib import Path

import cuflash
import pytest

pytest.importorskip("matplotlib", reason="the experiments need matplotlib: pip install -e '.[experiments]'")
pytest.importorskip("rich", reason="the experiments need rich: pip install -e '.[experiments]'")

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
H100 = cuflash.DeviceSpec.gpu("H100")


# The tables


# The tables on the pages


def test_published_dense_calls_are_ahead_of_standard_attention_in_memory_linear_in_the_length(load) -> None:
    """Dense calls lead by 2 from 1024 tokens on, and by 7.6 over three separate kernels forward at 2048 tokens."""
    rows = load("harness").read_csv(EXPERIMENTS / "results" / "flashattention1_tables_gpu.csv")
    ms = {(row["method"], row["pass"], int(row["seqlen"])): float(row["ms"]) for row in rows}
    for method, way, seqlen in ms:
        if method in ("standard", "pytorch") and seqlen >= 1024:
            assert ms[method, way, seqlen] >= 2 * ms["dense", way, seqlen]
    assert ms["standard", "forward", 2048] >= 7.6 * ms["dense", "forward", 2048]
    for method in ("fa1", "dense", "butterfly"):
        mib = {int(row["seqlen"]): float(row["memory_mib"]) for row in rows if row["method"] == method}
        assert all(1.9 < mib[2 * seqlen] / mib[seqlen] < 2.1 for seqlen in mib if 2 * seqlen in mib and seqlen >= 512)


def test_published_counters_are_near_the_model(load) -> None:
    """Counters of fa1, and of the kernels that `auto` chooses, differ from the model by at most a fifth."""
    rows = load("harness").read_csv(EXPERIMENTS / "results" / "memory_traffic_gpu.csv")
    lengths = load("memory_traffic").Config().seqlens
    assert {(row["kernel"], int(row["seqlen"])) for row in rows} >= set(itertools.product(("fa1", "sm90"), lengths))
    assert all(0.8 <= float(row["measured_over_model"]) <= 1.2 for row in rows if row["kernel"] in ("fa1", "sm90"))


# The traffic

PRINTED = """==PROF== Connected to process 1503 (/usr/bin/python3)
==PROF== Disconnected from process 1503
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1503","fa1_forward","dram__bytes_read.sum","byte","3,560,369,152"
"0","1503","fa1_forward","dram__bytes_write.sum","byte","2,410,447,616"
"0","1503","fa1_forward","lts__t_bytes.sum","byte","8,976,395,264"
"1","1503","fa1_backward","dram__bytes_read.sum","byte","9,120,865,024"
"1","1503","fa1_backward","dram__bytes_write.sum","byte","4617513216.5"
"""


def test_counters_are_read_from_what_ncu_prints(load) -> None:
    traffic, profiler = load("memory_traffic"), load("profiler")
    launches = traffic.totals(profiler.parsed(PRINTED, traffic.METRICS))
    assert launches == [("fa1_forward", 5970816768), ("fa1_backward", 13738378240)]
    assert traffic.by_shape(launches, 1) == [dict(launches)]
    longer = [(name, 4 * moved) for name, moved in launches]
    assert traffic.by_shape([*launches, *longer, longer[1]], 2) == [
        dict(launches), {"fa1_forward": longer[0][1], "fa1_backward": 2 * longer[1][1]}
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="ncu saw fa1_forward 1 times at 2 shapes"):
        traffic.by_shape(launches, 2)
    with pytest.raises(RuntimeError, match="ncu saw no kernel: ==ERROR== ERR_NVGPUCTRPERM"):
        profiler.parsed("==ERROR== ERR_NVGPUCTRPERM", traffic.METRICS)
    with pytest.raises(RuntimeError, match="no number for dram__bytes_read.sum of fa1_forward: n/a"):
        profiler.parsed(PRINTED.replace("3,560,369,152", "n/a"), traffic.METRICS)


def test_a_profile_names_the_commonest_wait(load) -> None:
    profile, profiler = load("kernel_profile"), load("profiler")
    counters = dict.fromkeys(profile.METRICS, 0.0) | {
        "gpu__time_duration.sum": 12_340.0, profile.STALLS["barrier"]: 1.0, profile.STALLS["long_scoreboard"]: 3.0,
    }  # fmt: skip
    row = profile.record_of("quest", 1, profiler.Launch("page_choice", counters))
    assert (row["kernel"], row["us"]) == ("page_choice", 12.34)
    assert (row["stall"], row["stall_share"]) == ("long_scoreboard", 0.75)
    assert len(profile.table([row]).rows) == 1


def test_rows_compare_the_counters_of_a_pass_with_the_model(load) -> None:
    traffic = load("memory_traffic")
    config = traffic.Config(seqlens=(4096,), kernels=("fa1", "naive"))
    rows = list(traffic.run(config))
    assert [(row["kernel"], row["pass"]) for row in rows] == list(itertools.product(("fa1", "naive"), traffic.WAYS))
    assert all(row["measured_mb"] is None for row in rows)
    moved = {(way, f"fa1_{way}"): 10**9 for way in traffic.WAYS}
    counters = dict(traffic.totals(load("profiler").parsed(PRINTED, traffic.METRICS)))
    forward, backward = traffic.rows_of(config, "fa1", 4096, moved, counters)
    assert (forward["measured_over_model"], backward["measured_over_model"]) == (5.970816768, 13.73837824)
    assert len(traffic.table([forward, backward]).rows) == 2 and len(traffic.plot([forward, backward]).axes) == 2


def test_the_model_is_the_order_that_the_papers_prove(load) -> None:
    """Twice the tokens move four times the bytes if matrices or tiles are moved repeatedly, and otherwise twice."""
    traffic = load("memory_traffic")
    for kernel, growth in (("naive", 4), ("fa1", 4), ("sm80", 2), ("sm90", 2)):
        short, long = (
            sum(traffic.modelled(traffic.plan_of((16, 8, seqlen, 64), kernel, H100)).values())
            for seqlen in (8192, 16384)
        )
        assert growth * 0.95 < long / short <= growth
