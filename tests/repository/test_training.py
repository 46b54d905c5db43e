"""Training of the language model, and the task on far ends: tiny sizes also show what the published rows show."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import cuflash
import numpy as np
import pytest
from published_rows import published

pytest.importorskip("matplotlib", reason="the experiments need matplotlib: pip install -e '.[experiments]'")
pytest.importorskip("rich", reason="the experiments need rich: pip install -e '.[experiments]'")

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def training(load) -> ModuleType:
    return load("training")


def recipe(training: ModuleType, name: str = "exact", **changes: Any) -> Any:
    sizes = {"context": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "width": 16}
    shape = training.model.Config(vocabulary=len(training.ALPHABET), **sizes)
    return training.Recipe(attention=name, model=shape, batch=2, steps=6, block=16, **changes)


# Steps


def test_an_interrupted_training_ends_with_the_same_bits(training: ModuleType, tmp_path: Path) -> None:
    """Training is interrupted between two checkpoints, and the steps after the last checkpoint are run again."""
    text, exact = training.library_text(5000), training.model.exact
    whole = training.Training.new(recipe(training), np)
    list(whole.steps(text, exact, tmp_path / "whole", every=6))
    first = training.Training.continued(recipe(training), np, tmp_path)
    for _ in zip(range(5), first.steps(text, exact, tmp_path, every=2)):
        pass
    resumed = training.Training.continued(recipe(training), np, tmp_path)
    assert len(resumed.losses) == 4
    assert list(resumed.steps(text, exact, tmp_path, every=2)) == whole.losses[4:]
    assert resumed.losses == whole.losses and len(whole.losses) == 6
    for part in ("flat", "means", "squares"):
        assert np.array_equal(getattr(resumed, part), getattr(whole, part))
    assert list(training.Training.continued(recipe(training), np, tmp_path).steps(text, exact, tmp_path, every=2)) == []


def test_steps_never_see_the_held_out_text(training: ModuleType) -> None:
    text = np.arange(2000)
    for step in range(1, 50):
        tokens = training.pieces(text, recipe(training), step)
        assert tokens.shape == (2, 49) and tokens.max() < training.trained_on(text) == 1800
        assert (np.diff(tokens) == 1).all()
    assert not np.array_equal(training.pieces(text, recipe(training), 1), training.pieces(text, recipe(training), 2))


# Attentions


def test_naive_attention_is_exact_and_a_wrong_key_is_not(training: ModuleType) -> None:
    """Naive and library results differ by at most the sum of both bounds.

    Four query heads share two key/value heads.
    """
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((2, heads, 48, 8)) for heads in (4, 2, 2, 4))
    ways = training.attentions(training.block_indices(48, 16))
    right, pull = ways["exact"](q, k, v)
    bounds = cuflash.error_bound(q, k, v, do, causal=True)
    for name in ("naive", "wrong_key"):
        o, vjp = ways[name](q, k, v)
        pairs = zip((o, *vjp(do)), (right, *pull(do)), (bounds.o, bounds.dq, bounds.dk, bounds.dv), strict=True)
        are_near = [(np.abs(actual - expected) <= 2 * bound).all() for actual, expected, bound in pairs]
        assert all(are_near) if name == "naive" else not any(are_near)


def test_losses_agree_but_with_a_wrong_key_and_every_attention_has_its_row(load, tmp_path: Path) -> None:
    experiment = load("train_language_model")
    config = experiment.Config(
        context=64, batch=1, steps=12, compared_steps=12, characters=3000, budget_mib=2, checkpoints=tmp_path
    )
    rows = list(experiment.run(config))
    runs = {row["attention"]: row for row in rows if row["part"] == "run"}
    assert tuple(runs) == experiment.NAMES
    assert runs["exact"]["gap"] <= runs["exact"]["bound"] < runs["wrong_key"]["gap"]
    assert runs["exact"]["step"] == 12 > runs["wrong_key"]["step"]
    assert min(runs["sink_local"]["gap"], runs["butterfly"]["gap"]) > runs["exact"]["gap"]
    for name in experiment.NAMES[:4]:
        assert runs[name]["tokens_per_s"] > 0 and runs[name]["peak_mib"] > 0 and runs[name]["held_out_loss"] > 0
    assert list(tmp_path.iterdir()) == []  # an experiment that has ended leaves no checkpoint
    assert 32 <= runs["naive"]["longest_context"] <= runs["exact"]["longest_context"]
    assert experiment.plot(rows).axes and experiment.table(rows).renderables


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["gpu", "long"])
def test_a_language_model_trains_on_a_gpu(load, tmp_path: Path, part: str) -> None:
    experiment = load("train_language_model")
    config = experiment.Config(
        **{part: True}, gpu_context=128, gpu_batch=2, gpu_steps=10, compared_steps=10, gpu_budget_mib=64,
        characters=40000, checkpoints=tmp_path, long_contexts=(128, 256), long_tokens=512, long_steps=4, long_layers=1,
    )  # fmt: skip
    rows = list(experiment.run(config))
    if part == "gpu":
        runs = {row["attention"]: row for row in rows if row["part"] == "run"}
        assert runs["exact"]["gap"] <= runs["exact"]["bound"] < runs["wrong_key"]["gap"]
    else:
        assert [row["attention"] for row in rows] == list(experiment.NAMES[:4]) * 2
        assert all(row["ms"] > 0 and np.isfinite(row["loss"]) for row in rows)
    experiment.table(rows), experiment.plot(rows)


# Far ends


def test_ends_are_far_apart_and_labels_are_equal_colours(load) -> None:
    task = load("long_range")
    tokens, goals, labels = task.sequences(256, 4000, (1,))
    starts = ((tokens >= task.START) & (tokens < task.GOAL)).argmax(axis=1)
    rows = np.arange(len(tokens))
    assert ((tokens >= task.START).sum(axis=1) == 2).all() and (tokens[rows, goals] >= task.GOAL).all()
    assert (goals - starts > 128).all() and starts.min() >= 32
    first, second = tokens[rows, starts] - task.START, tokens[rows, goals] - task.GOAL
    assert np.array_equal(first == second, labels == 1)
    other, _, answers = task.recoloured(tokens, goals, labels)
    assert np.array_equal(other[rows, starts] - task.START == second, answers == 1)
    assert ((other != tokens).sum(axis=1) == 1).all() and np.array_equal(answers, 1 - labels)
    for colours in (first, second):  # one end alone reveals nothing: six standard errors of a share in 1000 draws
        shares = [labels[colours == colour].mean() for colour in range(task.COLOURS)]
        assert np.abs(np.array(shares) - 0.5).max() < 6 * 0.5 / 900**0.5


@pytest.mark.parametrize(("seqlen", "block"), [(64, 4), (512, 32), (2048, 128), (4096, 128), (16384, 128)])
def test_two_steps_connect_the_ends_by_far_patterns_alone(load, seqlen: int, block: int) -> None:
    """The test checks, in blocks, whether two attention steps from the second end reach the first end."""
    task, grid = load("long_range"), seqlen // block
    for name in task.NAMES:
        mask = task.mask_of(name, seqlen, block)
        blocks = np.ones((grid, grid), bool)
        if mask is not None:
            index = task.cuflash.BlockIndex.from_mask(mask, seqlen, seqlen, block)
            blocks = index.to_scipy().toarray() > 0
        reached = (blocks.astype(int) @ blocks.astype(int) > 0)[3 * grid // 4 :, grid // 8 : grid // 4]
        assert reached.all() if name in ("exact", "bigbird", "strided") else not reached.any(), name


# Published results


def test_published_losses_agree_and_the_wrong_key_is_seen() -> None:
    runs = {row["attention"]: row for row in published("train_language_model") if row["part"] == "run"}
    assert int(runs["exact"]["step"]) >= 200
    assert float(runs["exact"]["gap"]) <= float(runs["exact"]["bound"]) < float(runs["wrong_key"]["gap"])


PUBLISHED = [path.stem for path in (EXPERIMENTS / "results").glob("long_range*.csv")]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_far_patterns_learn_and_local_ones_do_not(load, name: str) -> None:
    task = load("long_range")
    rows = published(name)
    cases = {(int(row["seed"]), row["pattern"]) for row in rows}
    assert cases == set(task.Config(gpu=name.endswith("gpu")).cases)
    for row in rows:
        share = float(row["accuracy"])
        assert share >= 0.9 if row["pattern"] in ("exact", "bigbird", "strided") else share <= 0.52, row


def test_the_archive_of_the_language_model_says_where_it_is_from(load) -> None:
    q, k, v = load("workloads").language_activations()
    assert q.shape == k.shape == v.shape == (4, 512, 32) and all(np.isfinite(x).all() for x in (q, k, v))
    path = EXPERIMENTS / "data" / "language_activations.npz"
    with np.load(path) as archive:
        provenance = json.loads(str(archive["provenance"]))
    assert path.stat().st_size <= 2**20 and provenance.keys() >= {
        "model",
        "text",
        "steps",
        "held_out_loss",
        "commit",
        "date",
    }
    readme = (EXPERIMENTS / "data" / "README.md").read_text("utf-8")
    assert str(provenance["held_out_loss"]) in readme and provenance["date"] in readme
