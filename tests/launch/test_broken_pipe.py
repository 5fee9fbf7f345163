"""`sharding --help | head -1` ends without a traceback."""

import os
import sys

import pytest
from support.closed_pipe import run_into_a_closed_pipe

from sharding.launch import COMMANDS, broken_pipe
from sharding.launch.exit_codes import READER_GONE


@pytest.mark.parametrize(
    "name", ["", "train", *(pytest.param(c, marks=pytest.mark.slow) for c in COMMANDS if c != "train")]
)
def test_help_into_a_closed_pipe(name: str):
    done = run_into_a_closed_pipe(sys.executable, "-m", "sharding.launch", *name.split(), "--help")
    assert (done.stderr, done.returncode) == ("", READER_GONE)


@pytest.mark.parametrize("printed", ["print('x')", "print('x', flush=True)", "print('x' * 10**6)"])
def test_output_into_a_closed_pipe(printed: str):
    """What is still buffered at the end counts too."""
    program = f"from sharding.launch import broken_pipe\nwith broken_pipe.exits_if_reader_gone(): {printed}"
    done = run_into_a_closed_pipe(sys.executable, "-c", program)
    assert (done.stderr, done.returncode) == ("", READER_GONE)


def test_another_broken_pipe_is_raised():
    with (
        pytest.raises(BrokenPipeError, match="a connection"),
        open(os.devnull, "w") as file,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stdout", file)
        with broken_pipe.exits_if_reader_gone():
            raise BrokenPipeError("a connection")


def test_a_closed_standard_output_is_no_error():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        with broken_pipe.exits_if_reader_gone():
            print("nowhere")
