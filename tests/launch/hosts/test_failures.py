"""Which process failed first, exit codes in words, and the output that is kept and shown."""

import io
import itertools
import signal
from pathlib import Path

import pytest

from sharding.launch.exit_codes import USER_ERROR
from sharding.launch.hosts.agent_channel import Host
from sharding.launch.hosts.failures import ProcessStatus, describe_exit
from sharding.launch.hosts.process_output import KEPT_ERRORS, SHOWN_ERRORS, ProcessOutput

HOST = Host(name="a", address="a", command=("agent",), processes=(0, 1))

# Exit code and error output, the most likely root cause first; equal ones are in one group.
LIKELY_CAUSES = [
    [(-signal.SIGKILL, ""), (-signal.SIGSEGV, "Gloo"), (-signal.SIGTERM, "heartbeat")],
    [(USER_ERROR, "error: no such mesh"), (USER_ERROR, "Connection reset by peer")],
    [(1, "RuntimeError: the disk is gone"), (3, ""), (127, "no such program")],
    [(1, "Gloo all-reduce failed"), (1, "lost the coordination service"), (-signal.SIGABRT, "")],
    [(1, "Connection reset by peer"), (1, "CoordinationService"), (1, "heartbeat timeout")],
]
LIKELY_CAUSES[3:] = [LIKELY_CAUSES[3] + LIKELY_CAUSES[4]]


def test_what_a_failure_causes_is_not_its_cause():
    for (above, causes), (below, others) in itertools.combinations(enumerate(LIKELY_CAUSES), 2):
        for (code, error), (other_code, other_error) in itertools.product(causes, others):
            first = ProcessStatus(host=HOST, code=code, exited=9.0).root_cause_order(error)
            assert first < ProcessStatus(host=HOST, code=other_code, exited=1.0).root_cause_order(other_error)
            assert above < below


@pytest.mark.parametrize("causes", LIKELY_CAUSES, ids=len)
def test_of_like_failures_the_first_counts(causes: list[tuple[int, str]]):
    for (code, error), (other_code, other_error) in itertools.product(causes, causes):
        first = ProcessStatus(host=HOST, code=code, exited=1.0).root_cause_order(error)
        assert first < ProcessStatus(host=HOST, code=other_code, exited=2.0).root_cause_order(other_error)


def test_exit_codes_in_words():
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL"
    assert describe_exit(-200) == "was killed by signal 200"


def shown(lines: list[tuple[int, str, bool]], **options: object) -> list[str]:
    out = io.StringIO()
    output = ProcessOutput(out=out, **options)
    for process, text, is_error in lines:
        output.add(process, text, is_error=is_error)
    return out.getvalue().splitlines()


LINES = [(process, f"{process} {is_error}", is_error) for process in range(3) for is_error in (False, True)]


def test_lines_shown():
    assert shown(LINES, all_lines=True) == [f"[{process}] {text}" for process, text, _ in LINES]
    assert shown(LINES) == [f"[{process}] {text}" for process, text, is_error in LINES if is_error or process == 0]


NOISE = [
    "[Gloo] Rank 0 is connected to 2 peer ranks. Expected number of connected peer ranks is : 2",
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0725 10:00:00.123456   12345 service.cc:1] started",
    "W0725 10:00:00.123456   12345 service.cc:1] slow",
    "2026-07-25 10:00:00.1: I external/xla/service.cc:1] started",
    "2026-07-25 10:00:00.1: W xla/service.cc:1] slow",
]
NO_NOISE = ["E0725 10:00:00.123456   12345 x.cc:1] failed", "loss 1.0", "2026-07-25: E xla/x.cc:1] failed"]


def test_noise_is_only_in_the_logs(tmp_path: Path):
    lines = [(0, text, True) for text in (*NOISE, *NO_NOISE)]
    assert shown(lines, folder=tmp_path / "new" / "logs") == [f"[0] {text}" for text in NO_NOISE]
    kept = (tmp_path / "new" / "logs" / "process-0.log").read_text()
    assert kept == "".join(f"{text}\n" for text in (*NOISE, *NO_NOISE))


@pytest.mark.parametrize(
    "start",
    ["error: no such mesh", "Traceback (most recent call last):", "Fatal Python error: x", "E0725 a", "F0725 b"],
)
def test_the_last_error_from_its_first_line(start: str):
    output = ProcessOutput(out=io.StringIO())
    for text in ("error: an old one", "warming up", start, "", "  detail", "RuntimeError: x"):
        output.add(1, text, is_error=True)
    output.add(1, "Traceback (most recent call last): on stdout", is_error=False)
    assert output.error(1) == [start, "  detail", "RuntimeError: x"]
    assert output.error(0) == []
    output.forget_errors()
    assert output.error(1) == []


def test_the_end_of_a_long_error():
    output = ProcessOutput(out=io.StringIO())
    for number in range(3 * KEPT_ERRORS):
        output.add(0, f"line {number}", is_error=True)
    assert output.error(0) == [f"line {number}" for number in range(3 * KEPT_ERRORS)][-SHOWN_ERRORS:]
    assert len(output._errors[0]) == KEPT_ERRORS


def test_lines_of_the_launcher():
    out = io.StringIO()
    ProcessOutput(out=out).log("one\ntwo")
    assert out.getvalue() == "[launch] one\n[launch] two\n"
