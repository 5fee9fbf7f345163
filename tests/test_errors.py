"""The format of the error message."""

import pickle
import textwrap

import pytest

from sharding.errors import ShardingError, raise_together, together


def text(written: str) -> str:
    return textwrap.dedent(written).strip("\n")


def test_message_has_four_parts_in_order():
    error = ShardingError(
        "step: argument state/params/w, spec P('data')",
        found=["shape (6, 4)", "mesh data=4"],
        required="a dim divisible by its axes: 6 % 4 = 2",
        fix="P(None)",
    )
    assert str(error) == text("""
        step: argument state/params/w, spec P('data')
          found:    shape (6, 4)
                    mesh data=4
          required: a dim divisible by its axes: 6 % 4 = 2
          fix:      P(None)
    """)


def test_missing_parts_have_no_line():
    assert str(ShardingError("asked")) == "asked"
    assert str(ShardingError("asked", fix="this")) == "asked\n  fix:      this"


def test_multiline_text_is_several_lines():
    assert ShardingError("asked", found="one\ntwo").found == ("one", "two")


def test_is_a_value_error_and_keeps_its_parts():
    with pytest.raises(ValueError, match="asked") as caught:
        raise ShardingError("asked", found="a", required="b", fix=["c", "d"])
    error = caught.value
    assert isinstance(error, ShardingError)
    assert (error.asked, error.found, error.required, error.fix) == ("asked", ("a",), "b", ("c", "d"))


def test_survives_pickling():
    error = ShardingError("asked", found="a", required="b", fix="c")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.asked, copy.found, copy.required, copy.fix) == (error.asked, error.found, error.required, error.fix)


def test_one_failure_is_returned_unchanged():
    error = ShardingError("asked")
    assert together("all", [error]) is error


def test_shared_parts_of_failures_are_written_once():
    failures = [ShardingError(name, found=f"size {size}", required="even") for name, size in [("x", 3), ("y", 5)]]
    assert str(together("step", failures)) == text("""
        step: 2 failures
          1. x
               found:    size 3
          2. y
               found:    size 5
          required: even
    """)


def test_different_parts_of_failures_are_kept():
    failures = [ShardingError("x", required="even", fix="2"), ShardingError("y", required="odd", fix="2")]
    assert str(together("step", failures)) == text("""
        step: 2 failures
          1. x
               required: even
          2. y
               required: odd
          fix:      2
    """)


def test_raise_together_without_failures():
    raise_together("step", [])
    with pytest.raises(ShardingError, match="x"):
        raise_together("step", [ShardingError("x")])
