"""The form of the error message."""

import pickle
import textwrap

import pytest

from sharding.errors import ShardingError, raise_together, together


def text(written: str) -> str:
    return textwrap.dedent(written).strip("\n")


def test_message_has_four_parts_in_order():
    error = ShardingError(
        "step: argument state/params/w, spec P('data')",
        there=["shape (6, 4)", "mesh data=4"],
        must="the axes of a dim divide it: 6 % 4 = 2",
        fix="P(None)",
    )
    assert str(error) == text("""
        step: argument state/params/w, spec P('data')
          there is:  shape (6, 4)
                     mesh data=4
          must hold: the axes of a dim divide it: 6 % 4 = 2
          try:       P(None)
    """)


def test_parts_that_are_not_given_leave_no_line():
    assert str(ShardingError("asked")) == "asked"
    assert str(ShardingError("asked", fix="this")) == "asked\n  try:       this"


def test_text_of_several_lines_is_several_lines():
    assert ShardingError("asked", there="one\ntwo").there == ("one", "two")


def test_is_a_value_error_and_keeps_its_parts():
    with pytest.raises(ValueError, match="asked") as caught:
        raise ShardingError("asked", there="a", must="b", fix=["c", "d"])
    error = caught.value
    assert isinstance(error, ShardingError)
    assert (error.asked, error.there, error.must, error.fix) == ("asked", ("a",), "b", ("c", "d"))


def test_survives_pickling():
    error = ShardingError("asked", there="a", must="b", fix="c")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.asked, copy.there, copy.must, copy.fix) == (error.asked, error.there, error.must, error.fix)


def test_one_failure_is_returned_as_it_is():
    error = ShardingError("asked")
    assert together("all", [error]) is error


def test_failures_together_say_once_what_they_share():
    failures = [ShardingError(name, there=f"size {size}", must="even") for name, size in [("x", 3), ("y", 5)]]
    assert str(together("step", failures)) == text("""
        step: 2 failures
          1. x
               there is:  size 3
          2. y
               there is:  size 5
          must hold: even
    """)


def test_failures_together_keep_what_differs():
    failures = [ShardingError("x", must="even", fix="2"), ShardingError("y", must="odd", fix="2")]
    assert str(together("step", failures)) == text("""
        step: 2 failures
          1. x
               must hold: even
          2. y
               must hold: odd
          try:       2
    """)


def test_raise_together_is_silent_without_failures():
    raise_together("step", [])
    with pytest.raises(ShardingError, match="x"):
        raise_together("step", [ShardingError("x")])
