"""Mutants of small files: what is changed, what is left alone, and that the choice is reproducible."""

import ast
import sys
from pathlib import Path

import pytest

from mutate.line_coverage import LineRecorder, TestLines, covering_tests
from mutate.mutants import Mutant, mutant, sample


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
        ("for a in zip(b, c, strict=True): pass", []),
        ("@dataclass(frozen=True)\nclass A:\n    b: Literal[1] = 2", ["    b: Literal[1] = 3"]),
        ("warn('too few', a + 1)", []),
        ("def f(a: Literal[1] = 0) -> Literal[2]: return a", ["def f(a: Literal[1] = 1) -> Literal[2]: return a"]),
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


@pytest.mark.parametrize(
    ("text", "lines", "statement", "at_import"),
    [
        ("a = 1\nb = (\n    c < d\n)", (3, 4), (2, 5), True),
        ("def f(a=b < c):\n    return a", (1, 2), (1, 3), True),
        ("def f(a):\n    return (\n        a < 2.5\n    )", (3, 4), (2, 5), False),
        ("class A:\n    b = c < d", (2, 3), (2, 3), True),
        ("f = lambda a: a < b", (1, 2), (1, 2), False),
    ],
)
def test_where_a_mutant_is(tmp_path, text, lines, statement, at_import):
    path = tmp_path / "one.py"
    path.write_text(text + "\n")
    found = (mutant(tmp_path, path, index) for index in range(3))
    one = next(m for m in found if "<=" in m.change)
    assert (one.lines, one.statement, one.at_import) == (range(*lines), range(*statement), at_import)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring")
def test_lines_count_for_the_file_that_a_link_leads_to(tmp_path):
    for name in ("sharding", "models", "others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("def f():\n    return 1\n")
    (tmp_path / "sharding/models").symlink_to(tmp_path / "models")
    recorder = LineRecorder(tmp_path, ("sharding/", "models/"), tmp_path / "lines.json")
    for name in ("sharding/models/a.py", "models/a.py", "sharding/a.py", "others/a.py", "../a.py"):
        module = compile("def f():\n    return 1\n", str(tmp_path / name), "exec")
        recorder._line(module, 1)
        recorder._line(next(part for part in module.co_consts if hasattr(part, "co_name")), len(name))
    assert recorder.hits == {"models/a.py": {len("sharding/models/a.py"), len("models/a.py")}, "sharding/a.py": {13}}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring")
def test_lines_of_an_import_are_no_test_s(tmp_path):
    """Those of a module and of its classes: the test that imports a file first is not the one that sees a change."""
    file = tmp_path / "a.py"
    file.write_text("class A:\n    b: int = 1\n\n    def f(self):\n        return lambda: 2\n")
    recorder = LineRecorder(tmp_path, ("a.py",), tmp_path / "lines.json")
    waiting, seen = [compile(file.read_text(), str(file), "exec")], []
    while waiting:
        code = waiting.pop()
        seen.append(code.co_name)
        waiting += [part for part in code.co_consts if hasattr(part, "co_name")]
        for _, _, line in code.co_lines():
            recorder._line(code, line)
    assert seen == ["<module>", "A", "f", "<lambda>"]
    assert recorder.hits == {"a.py": {4, 5}}


def test_tests_that_execute_a_line_come_most_specific_first():
    def mutant_of(lines, statement=range(1, 9), at_import=False):
        return Mutant(path="a.py", lines=lines, statement=statement, at_import=at_import, source="", change="")

    def test(seconds, **lines):
        return TestLines(seconds=seconds, lines={f"{name}.py": set(found) for name, found in lines.items()})

    coverage = {
        "tests/test_b.py::large": test(2, a=[3, 4, 5], b=[1]),
        "tests/test_b.py::small": test(1, a=[3]),
        "tests/test_a.py::own": test(4, a=[3, 4, 5, 6], b=[1, 2]),
        "tests/test_b.py::other": test(1, b=[3]),
    }

    def names(one, seconds=100):
        found = covering_tests(coverage, one, mirrored="tests/test_a.py", seconds=seconds)
        return [name.partition("::")[2] for name in found]

    assert names(mutant_of(range(3, 4))) == ["own", "small", "large"]
    assert names(mutant_of(range(3, 4)), seconds=5) == ["own", "small"]
    assert names(mutant_of(range(3, 4)), seconds=1) == ["own"]  # one at least
    assert names(mutant_of(range(4, 5))) == ["own", "large"]
    assert names(mutant_of(range(7, 8), range(6, 8))) == ["own"]  # the lines of a statement count together
    assert names(mutant_of(range(8, 9), range(8, 9))) == []
    assert names(mutant_of(range(8, 9), range(8, 9), at_import=True)) == ["own", "small", "large", "other"]
