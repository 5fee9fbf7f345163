"""Facts compared across processes: what differs is named with its line."""

from sharding.distributed import consistency


def test_a_single_process_agrees_with_itself():
    consistency.agree({"program": "text"}, about="test")


def test_first_difference_of_two_texts():
    assert consistency._first_difference("1.0", "2.0") == "1.0, not 2.0"
    assert consistency._first_difference("a\nb\nx", "a\nc\nx") == "line 2 is 'b', not 'c'"
    assert consistency._first_difference("a\nb", "a") == "line 2 is 'b', not ''"
