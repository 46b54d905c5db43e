"""Names are renamed as whole identifiers, in their scope, in sources and planted faults alike, or nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest
import renaming
from mutations.planting import Edit
from renaming import Refused, read_table

KERNEL = """#include <attention/turn.cuh>
// A turn of turns.
struct Turn {
  int turn = 0;
  CUFLASH_DEVICE int next() const { return turn + 1; }
};
CUFLASH_DEVICE void walk(Turn turn) {
  int turns = turn.next();  // the next turn
  f("turn", turn.turn);
}
CUFLASH_DEVICE void other(Turn turn) { g(turn); }
"""
MODULE = '''"""The turn."""
from cuflash import turn


def walk(turn, *, width=3):
    text = f"{{turn}} {turn!r:>{turn}} {width}" + "\\turn"
    return getattr(turn, "turn"), text
'''
FAULTS = '''_RING = "attention/turn.cuh"
EDITS = {
    "one": Edit(_RING, "Turn.next", "turn + 1", "turn"),
    "two": Edit(_RING, "walk", 'turn.next(); f("turn",', 'f("turn" + turns,'),
    "three": Edit("turn.py", "walk", "text = f\\"{{turn}} {turn!r:>{turn}} {width}\\"", "text = turn"),
}
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    texts = {
        "kernels_cu/attention/turn.cuh": KERNEL, "cuflash/turn.py": MODULE, "tests/test_edits.py": FAULTS,
        "README.md": "A turn is `a.turn`.\n",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path


def after(root: Path, table: str) -> dict[str, str]:
    """The files that change, by name."""
    result = renaming.renamed(root, read_table(table))
    return {path.relative_to(root).as_posix(): text for path, text in result.texts.items()}


def edits(text: str) -> list[Edit]:
    return [fault.edit for fault in renaming.faults_of(text)]


def test_whole_identifiers_change_in_sources_and_faults(root: Path) -> None:
    texts = after(root, "turn state\n\nTurn State  # a type\n_RING RING")
    assert texts["kernels_cu/attention/turn.cuh"] == """#include <attention/turn.cuh>
// A turn of turns.
struct State {
  int state = 0;
  CUFLASH_DEVICE int next() const { return state + 1; }
};
CUFLASH_DEVICE void walk(State state) {
  int turns = state.next();  // the next turn
  f("turn", state.state);
}
CUFLASH_DEVICE void other(State state) { g(state); }
"""
    assert texts["cuflash/turn.py"] == '''"""The turn."""
from cuflash import state


def walk(state, *, width=3):
    text = f"{{turn}} {state!r:>{state}} {width}" + "\\turn"
    return getattr(state, "turn"), text
'''
    assert edits(texts["tests/test_edits.py"]) == [
        Edit("attention/turn.cuh", "State.next", "state + 1", "state"),
        Edit("attention/turn.cuh", "walk", 'state.next(); f("turn",', 'f("turn" + turns,'),
        Edit("turn.py", "walk", 'text = f"{{turn}} {state!r:>{state}} {width}"', "text = state"),
    ]
    assert "README.md" not in texts and texts["tests/test_edits.py"].startswith('RING = "attention/turn.cuh"\n')


def test_comments_strings_and_pages_change_where_the_table_says_so(root: Path) -> None:
    texts = after(root, "turn state comments strings pages")
    assert texts["kernels_cu/attention/turn.cuh"].splitlines()[:2] == [
        "#include <attention/state.cuh>", "// A state of turns."
    ]  # fmt: skip
    assert 'f("state", state.state);' in texts["kernels_cu/attention/turn.cuh"]
    assert texts["cuflash/turn.py"] == '''"""The state."""
from cuflash import state


def walk(state, *, width=3):
    text = f"{{state}} {state!r:>{state}} {width}" + "\\turn"
    return getattr(state, "state"), text
'''
    assert texts["README.md"] == "A turn is `a.state`.\n"
    assert edits(texts["tests/test_edits.py"])[1].anchor == 'state.next(); f("state",'


def test_a_name_changes_in_its_scope_alone(root: Path) -> None:
    texts = after(root, "turn step in=kernels_cu/attention/*.cuh:walk\nturn state in=kernels_cu")
    lines = texts["kernels_cu/attention/turn.cuh"].splitlines()
    assert lines[4].endswith("return state + 1; }") and lines[7].startswith("  int turns = step.next();")
    assert lines[-1] == "CUFLASH_DEVICE void other(Turn state) { g(state); }"
    assert set(texts) == {"kernels_cu/attention/turn.cuh", "tests/test_edits.py"}
    assert [edit.anchor for edit in edits(texts["tests/test_edits.py"])][:2] == ["state + 1", 'step.next(); f("turn",']


def test_names_change_places(root: Path) -> None:
    texts = after(root, "turns next in=kernels_cu\nnext turns in=kernels_cu")
    assert "int next = turn.turns();" in texts["kernels_cu/attention/turn.cuh"]
    assert edits(texts["tests/test_edits.py"])[0].function == "Turn.turns"
    assert edits(texts["tests/test_edits.py"])[1] == Edit(
        "attention/turn.cuh", "walk", 'turn.turns(); f("turn",', 'f("turn" + next,'
    )


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("turn turns", r"turn -> turns: the new name stands beside the old one in kernels_cu/attention/turn.cuh:8"),
        ("Turn width", r"Turn -> width: the new name stands without the old one in cuflash/turn.py:5"),
        ("turn x\nturns x in=kernels_cu", r"turn, turns would all be x in kernels_cu/attention/turn.cuh"),
        ("turn x in=kernels_cu\nturn y in=kernels_cu/attention", "turn has two new names in one scope"),
        ("tur x", "tur stands nowhere in any file"),
        ("turn x in=kernels_cu/sm90", "turn stands nowhere in kernels_cu/sm90"),
        ("turn", "line 1: an old and a new identifier come first: 'turn'"),
        ("turn if", "line 1: an old and a new identifier come first"),
        ("turn a.b", "line 1: an old and a new identifier come first"),
        ("turn x comment", "line 1: comment is no option"),
    ],
)
def test_what_cannot_be_renamed_is_refused(root: Path, table: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        after(root, table)


def test_a_new_name_may_stand_there_where_the_table_says_so(root: Path) -> None:
    assert "  int turns = turns.next();" in after(root, "turn turns collides")["kernels_cu/attention/turn.cuh"]
    assert "struct width {" in after(root, "Turn width elsewhere")["kernels_cu/attention/turn.cuh"]
    with pytest.raises(Refused, match="beside the old one"):
        after(root, "turn turns elsewhere")


def test_a_fault_that_would_fit_no_more_is_refused(root: Path) -> None:
    text = "CUFLASH_DEVICE void walk(Turn turn) { h(turn); h(other); f(0); }"
    (root / "kernels_cu/attention/turn.cuh").write_text(text)
    (root / "tests/test_edits.py").write_text('Edit("attention/turn.cuh", "walk", "h(turn)", "f(1)")')
    with pytest.raises(Refused, match=r"a fault would fit no more: .*'h\(other\)' stands 2 times in walk"):
        after(root, "turn other collides")


def test_a_fault_that_is_no_literal_is_refused(root: Path) -> None:
    (root / "tests/test_edits.py").write_text('Edit("attention/turn.cuh", "walk", f"{x}", "")')
    with pytest.raises(Refused, match="must be literals"):
        after(root, "turn state")


@pytest.mark.parametrize("length", [40, 60, 90, 130, 300])
def test_a_fault_is_written_within_the_width_of_a_line(root: Path, length: int) -> None:
    name = "a_long_name_of_a_turn"
    anchor = " + ".join(["turn"] * (length // 7))
    (root / "kernels_cu/attention/turn.cuh").write_text(f"void walk() {{ f({anchor}); }}")
    (root / "tests/test_edits.py").write_text(
        f'E = {{\n    "one": Edit("attention/turn.cuh", "walk", "f({anchor})", "f(\\"turn\\")"),\n}}\n'
    )
    text = after(root, f"turn {name}")["tests/test_edits.py"]
    assert max(map(len, text.splitlines())) <= renaming.WIDTH
    assert edits(text) == [("attention/turn.cuh", "walk", f"f({anchor.replace('turn', name)})", 'f("turn")')]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('f"a {b} {{c}} {d!r}"', ["b", "d"]),
        ("rf'{a[\"x\"]:>{b}}}}'", ['a["x"]', "b"]),
        ('f"{a != b} {c:{d}.{e}} {f(1, {2: 3}[2])}"', ["a != b", "c", "d", "e", "f(1, {2: 3}[2])"]),
        ('f"""{a}\n"b" {c}"""', ["a", "c"]),
        ('"{a}"', []),
    ],
)
def test_fields_of_formatted_strings_are_code(text: str, code: list[str]) -> None:
    parts = list(renaming.parts_of_string(text, "python"))
    assert [text[first:last] for is_code, first, last in parts if is_code] == code
    assert all(before[2] <= after[1] for before, after in zip(parts, parts[1:])) and parts[-1][2] == len(text)


def test_every_fault_of_the_library_is_found() -> None:
    texts = [path.read_text("utf-8") for path in (renaming.ROOT / "tests/mutations").glob("*.py")]
    tables = [text for text in texts if "\nFAULTS = {" in text]
    assert tables and [len(edits(text)) for text in tables] == [text.count(" Edit(") for text in tables]
