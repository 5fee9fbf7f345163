"""Mutants of small files: what is changed, what is left alone, and that the choice is reproducible."""

import ast
from pathlib import Path

import pytest

from mutate.mutants import mutant, sample


def changes(root: Path, text: str) -> list[str]:
    path = root / "sharding" / "one.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    found = []
    try:
        for index in range(100):
            found.append(mutant(root, path, index).change.splitlines()[-1].removeprefix("+"))
    except StopIteration:
        return found
    raise AssertionError("more mutants than expected")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = b < c", ["a = b <= c"]),
        ("a = b and c", ["a = b or c"]),
        ("a = not b", ["a = b"]),
        ("a = n + 1", ["a = n - 1", "a = n + 2"]),
        ("a = True", ["a = False"]),
        ("a = max(b)", ["a = min(b)"]),
        ("a = sorted(b, key=f)", ["a = list(b)"]),
        ("a = b if c else d", ["a = d if c else b"]),
        ("a = 'text' + b", []),
        ("a: int | None = None", []),
        ("raise ShardingError('too many', found=b[:8])", []),
        ("a = '\u00e9', b == c  # after a wide letter", ["a = '\u00e9', b != c  # after a wide letter"]),
    ],
)
def test_replacements(tmp_path, text, expected):
    assert changes(tmp_path, text + "\n") == expected


def test_every_mutant_of_a_file_parses_and_differs(tmp_path):
    source = Path(__file__).with_name("mutants.py").read_text()
    path = tmp_path / "sharding" / "one.py"
    path.parent.mkdir()
    path.write_text(source)
    found = [mutant(tmp_path, path, index) for index in range(20)]
    assert all(ast.dump(ast.parse(one.source)) != ast.dump(ast.parse(source)) for one in found)
    assert len({one.source for one in found}) == len(found)


def test_a_sample_is_reproducible_and_spread_over_rooms(tmp_path):
    for room in ("cost", "rules", "jit"):
        path = tmp_path / "sharding" / room / "one.py"
        path.parent.mkdir(parents=True)
        path.write_text("a = b < c\nd = e + f\n")
    first, again = (sample(tmp_path, 4, seed=3) for _ in range(2))
    assert first == again and len(first) == 4
    assert {one.room for one in sample(tmp_path, 3, seed=3)} == {"sharding/cost", "sharding/rules", "sharding/jit"}
    assert {one.room for one in sample(tmp_path, 9, seed=3, prefixes=("sharding/jit",))} == {"sharding/jit"}
