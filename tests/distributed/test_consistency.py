"""Facts compared across processes: what differs is named with its line."""

import pytest

from sharding.distributed import consistency


def test_a_single_process_agrees_with_itself():
    consistency.agree({"program": "text"}, about="test")


def test_first_difference_of_two_texts():
    assert consistency._first_difference("1.0", "2.0") == "1.0, not 2.0"
    assert consistency._first_difference("a\nb\nx", "a\nc\nx") == "line 2 is 'b', not 'c'"
    assert consistency._first_difference("a\nb", "a") == "line 2 is 'b', not ''"


def test_several_different_lines_are_counted_unless_the_texts_are_long():
    def difference(length, changed):
        lines = [f"line {k}" for k in range(length)]
        other = [f"other {k}" if k < changed else line for k, line in enumerate(lines)]
        return consistency._first_difference("\n".join(other), "\n".join(lines))

    first = "line 1 is 'other 0', not 'line 0'"
    assert difference(5, 1) == difference(199, 1) == first  # one line off, one on
    assert difference(5, 2) == difference(199, 2) == f"{first} (4 lines in all)"
    assert difference(200, 2) == first


def test_texts_that_only_one_process_has():
    assert consistency._first_difference("", "2.0") == "none, not 2.0"
    assert consistency._first_difference("1.0", "") == "1.0, not none"


def test_texts_are_sent_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch):
    facts = {"program": "line\n" * 100 + "\u00e9", "flags": "", "jax": "0.12"}
    text = "\0".join(f"{name}\1{value}" for name, value in facts.items())
    packed = consistency._pack(text)
    assert consistency._unpack(packed) == facts and len(packed) < len(text)
    for limit, expected in ((len(packed), facts), (len(packed) - 1, {})):
        monkeypatch.setattr(consistency, "_MAX_TEXT_BYTES", limit)
        assert consistency._unpack(consistency._pack(text)) == expected


def test_a_line_for_each_fact_that_differs():
    one, other = {"jax": "1", "flags": "a", "mesh": "m"}, {"jax": "2", "mesh": "m", "data": "d"}
    assert consistency._differences(3, one, 0, other) == [
        "process 3 differs from process 0 in data: none, not d",
        "process 3 differs from process 0 in flags: a, not none",
        "process 3 differs from process 0 in jax: 1, not 2",
    ]
    for texts in ((one, {}), ({}, one)):
        (line,) = consistency._differences(3, texts[0], 0, texts[1])
        assert line == "process 3 differs from process 0, in texts too long to compare"
