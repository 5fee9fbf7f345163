"""An agent serves one attempt and goes."""

import os
import subprocess
import sys

from sharding.launch.hosts.agent_messages import decode, encode


def test_an_agent_ends_with_its_last_process_although_its_supervisor_still_listens():
    start = {"is": "start", "command": [sys.executable, "-c", "print(6 * 7)"], "processes": []}
    start["processes"] = [{"process": 0, "environment": {}}]
    command = [sys.executable, "-m", "sharding.launch.hosts.agent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdin.write(encode(start))
        agent.stdin.flush()
        try:
            assert agent.wait(timeout=60) == 0  # a thread that reads stdin would keep it until that is closed
        finally:
            agent.kill()
        messages = [decode(line) for line in agent.stdout]
    assert [one["text"] for one in messages if one and one["is"] == "line"] == ["42"]
    assert [one["code"] for one in messages if one and one["is"] == "exit"] == [0]


def test_an_agent_that_mpirun_started_runs_its_command_with_the_variables_before_it():
    program = "import os; print(os.environ['FLAGS'], os.environ['EMPTY'] == '')"
    command = [sys.executable, "-m", "sharding.launch.hosts.agent", "FLAGS=--a=1 --b=2", "EMPTY=", "--"]
    environment = os.environ | {"OMPI_COMM_WORLD_RANK": "3"}
    done = subprocess.run([*command, sys.executable, "-c", program], env=environment, check=True, capture_output=True)
    messages = [decode(line) for line in done.stdout.splitlines()]
    lines = [(one["process"], one["text"]) for one in messages if one and one["is"] == "line"]
    assert lines == [(3, "--a=1 --b=2 True")]
