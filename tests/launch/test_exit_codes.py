"""Exit codes are those that shells and supervisors know, and each says one thing."""

import os
import signal
import subprocess

from sharding.distributed import processes
from sharding.launch import exit_codes


def test_codes_of_signals_are_those_of_the_shell():
    for code, number in ((exit_codes.INTERRUPTED, signal.SIGINT), (exit_codes.READER_GONE, signal.SIGPIPE)):
        assert subprocess.run(["sh", "-c", f"sh -c 'kill -{int(number)} $$'; exit $?"]).returncode == code


def test_no_two_codes_are_the_same():
    codes = [exit_codes.USER_ERROR, exit_codes.INTERRUPTED, exit_codes.READER_GONE, processes.CONNECT_ERROR]
    assert len({0, 1, *codes}) == 2 + len(codes)
    assert processes.CONNECT_ERROR == os.EX_TEMPFAIL
