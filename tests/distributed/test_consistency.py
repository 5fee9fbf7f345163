"""Facts compared across processes: what differs is named with its line."""

import ast
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import process_threads

from sharding import ShardingError
from sharding.distributed import consistency


def test_a_single_process_agrees_with_itself():
    consistency.agree({"program": "text"}, about="test")


def test_first_difference_of_two_texts():
    assert consistency._first_difference("1.0", "2.0") == "1.0, not 2.0"
    assert consistency._first_difference("a\nb\nx", "a\nc\nx") == "line 2 is 'b', not 'c'"
    assert consistency._first_difference("a\nb", "a") == "line 2 is 'b', not ''"


LINES = st.lists(st.one_of(st.text("ab \t", max_size=4), st.integers(0, 400).map(lambda n: n * "a" + "b")), max_size=4)


@settings(max_examples=300, deadline=None)
@given(LINES, LINES, st.sampled_from(["", "\n"]), st.sampled_from(["", "\n"]))
def test_what_is_shown_of_two_texts_differs(one, two, one_end, two_end):
    """Also where long lines differ at their end, or nothing but blanks and line ends do."""
    one, two = "\n".join(one) + one_end, "\n".join(two) + two_end
    if one == two or max(one.count("\n"), two.count("\n")) < 2:
        return
    shown = consistency._first_difference(one, two)
    number, mine, theirs = re.match(r"line (\d+) is ('.*'), not ('.*?')( \(\d+ lines in all\))?$", shown).groups()[:3]
    assert mine != theirs and max(map(len, (mine, theirs))) < 140
    for text, part in ((one, mine), (two, theirs)):
        line = (text.splitlines(keepends=True)[int(number) - 1 :] or [""])[0]
        assert ast.literal_eval(part).removeprefix("...") in line
    before = [text.splitlines()[: int(number) - 1] for text in (one, two)]
    assert [line for line in before[0] if line] == [line for line in before[1] if line]  # the first that differs


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
    facts = {"program": "line\n" * 100 + "\u00e9", "flags": "", "jax": "0.12", "odd": "a\0b\1c", "bytes": "\udcff"}
    packed = consistency._pack(facts)
    assert consistency._unpack(packed) == facts and len(packed) < sum(map(len, facts.values()))
    for limit, expected in ((len(packed), facts), (len(packed) - 1, {})):
        monkeypatch.setattr(consistency, "_MAX_TEXT_BYTES", limit)
        assert consistency._unpack(consistency._pack(facts)) == expected


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


def test_processes_with_the_same_facts_agree(monkeypatch: pytest.MonkeyPatch):
    facts = {"jax": "1", "program": "a\nb"}
    assert process_threads.run(monkeypatch, lambda index: consistency.agree(facts, about="test"), 3) == [None] * 3


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_process_that_differs_from_most_is_named_in_all(odd, monkeypatch: pytest.MonkeyPatch):
    def agree(index):
        consistency.agree({"jax": "2" if index == odd else "1", "flags": "f"}, about="sharding.initialize()")

    found = process_threads.run(monkeypatch, agree, 3)
    first = 1 if odd == 0 else 0
    assert [list(error.found) for error in found] == [
        [f"process {odd} differs from process {first} in jax: 2, not 1"]
    ] * 3
    assert all(isinstance(error, ShardingError) and "sharding.initialize()" in str(error) for error in found)


@pytest.mark.parametrize(("num_digits", "is_shown"), [(4 << 20, True), (11 << 19, False)])
def test_texts_that_no_message_holds_are_not_shown(num_digits, is_shown, monkeypatch: pytest.MonkeyPatch):
    """A digit takes about 0.7 bytes once it is packed, and the coordinator accepts 4 MiB."""
    text = random.Random(0).randbytes(num_digits // 2).hex()

    def agree(index):
        consistency.agree({"program": text[index:]}, about="test")

    found = process_threads.run(monkeypatch, agree, 2)
    assert all(("too long to compare" not in str(error)) == is_shown for error in found)
