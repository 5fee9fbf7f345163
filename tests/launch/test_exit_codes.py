"""Exit codes are those that shells and supervisors know, and each says one thing."""

import os
import signal

from sharding.distributed import processes
from sharding.launch import exit_codes


def test_codes_of_signals_are_those_of_the_shell():
    assert exit_codes.INTERRUPTED == 128 + signal.SIGINT
    assert exit_codes.READER_GONE == 128 + signal.SIGPIPE


def test_no_two_codes_are_the_same():
    codes = [exit_codes.USER_ERROR, exit_codes.INTERRUPTED, exit_codes.READER_GONE, processes.CONNECT_ERROR]
    assert len({0, 1, *codes}) == 2 + len(codes)
    assert processes.CONNECT_ERROR == os.EX_TEMPFAIL
