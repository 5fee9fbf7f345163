import os
from pathlib import Path

import pytest

from sharding import ShardingError
from sharding.launch.text import documents

LINE = "the quick brown fox jumps over the lazy dog, number {}\n"


def prose(num_lines: int, start: int = 0) -> str:
    return "".join(LINE.format(i) for i in range(start, start + num_lines))


def write(folder: Path, texts: dict[str, str]) -> list[Path]:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return [folder / name for name in texts]


def test_one_long_file_has_both_splits(tmp_path):
    text = prose(4000)
    found = documents.scan(write(tmp_path, {"a.txt": text}))
    parts = list(found.with_split())
    assert "".join(part for part, _ in parts) == text
    assert all(part.endswith("\n") and len(part) <= documents.DOCUMENT_BYTES + 100 for part, _ in parts)
    assert {side for _, side in parts} == {True, False}
    assert (found.num_bytes, found.num_documents) == (len(text), len(parts))


def test_the_split_depends_on_content(tmp_path):
    texts = {f"{i}.txt": prose(3, start=i) for i in range(200)}
    first = documents.scan(write(tmp_path / "a", texts))
    sides = dict(first.with_split())
    assert 0.01 < sum(sides.values()) / len(sides) < 0.12
    more = documents.scan([*first.paths, *write(tmp_path / "b", {"z.txt": prose(3), "y.txt": prose(5, 900)})])
    again = list(more.with_split())
    assert again[-2] == (prose(3), sides[prose(3)])
    assert all(sides.get(text, side) == side for text, side in again)


def test_something_is_always_held_out(tmp_path):
    for count in range(2, 12):
        files = write(tmp_path, {f"{i}.txt": prose(1, start=10 * count + i) for i in range(count)})
        sides = [side for _, side in documents.scan(files).with_split()]
        assert any(sides) and not all(sides)


def test_a_folder_is_its_files_by_name(tmp_path):
    write(tmp_path, {"b/x.txt": "x\n", "a.txt": "a\n", ".git/config": "no", "b/.hidden": "no", "empty.txt": ""})
    found = documents.scan([tmp_path])
    assert [path.relative_to(tmp_path).as_posix() for path in found.paths] == ["a.txt", "b/x.txt"]


def test_identity_is_content_and_order(tmp_path):
    one = write(tmp_path / "one", {"a": "x\n", "b": "y\n"})
    two = write(tmp_path / "two", {"k": "x\n", "l": "y\n"})
    assert documents.scan(one).sha256 == documents.scan(two).sha256
    assert documents.scan(one).sha256 != documents.scan(one[::-1]).sha256
    assert documents.scan(one).sha256 != documents.scan(write(tmp_path, {"a": "x\ny\n", "b": "z"})).sha256


def test_a_long_line_is_not_cut_inside_a_character(tmp_path):
    text = "x" + "\N{EURO SIGN}" * 40_000
    parts = [part for part, _ in documents.scan(write(tmp_path, {"a": text})).with_split()]
    assert len(parts) > 2 and "".join(parts) == text


def test_all_problems_are_listed(tmp_path):
    good, empty = write(tmp_path, {"good.txt": prose(5), "empty.txt": ""})
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"some\0thing")
    (tmp_path / "latin").write_bytes("caf\xe9".encode("latin-1"))
    names = ["folder", "binary", "latin", "none.txt"]
    with pytest.raises(ShardingError, match="UTF-8 text, or folders") as caught:
        documents.scan([good, empty, *(tmp_path / name for name in names)])
    shown = str(caught.value)
    for part in (
        "empty.txt: empty",
        "folder: no non-empty file",
        "binary: binary: contains a zero byte",
        "latin: not UTF-8 text: unexpected end of data, byte 0xe9",
        "none.txt: not found",
    ):
        assert part in shown
    assert "good" not in "".join(caught.value.found)


def test_an_unreadable_file(tmp_path):
    # Also for root, who ignores file modes: a path through a file, and a pipe.
    write(tmp_path, {"file": "x"})
    with pytest.raises(ShardingError, match="not found"):
        documents.scan([tmp_path / "file" / "inner"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ShardingError, match="pipe: not a regular file"):
        documents.scan([tmp_path / "pipe"])


@pytest.mark.parametrize("texts", [{"a": "one\n"}, {"a": "same\n", "b": "same\n"}], ids=["one", "equal"])
def test_one_document_is_too_few(texts, tmp_path):
    with pytest.raises(ShardingError, match="1 distinct document"):
        documents.scan(write(tmp_path, texts))


def test_files_that_change(tmp_path):
    found = documents.scan(write(tmp_path, {"a": prose(2), "b": prose(3)}))
    write(tmp_path, {"b": prose(4)})
    with pytest.raises(ShardingError, match="changed since they were scanned"):
        list(found.with_split())
