"""A network partition between two hosts, and its end."""

from pathlib import Path

import pytest
from support.clusters import namespaces
from support.process_groups import FAULT_STEP, Launched, check_complete_run, run_args


@pytest.mark.slow
def test_a_run_recovers_once_the_network_is_back(tmp_path: Path, uninterrupted: list[float]):
    out = tmp_path / "run"
    with namespaces(tmp_path) as two:
        args = ["launch", "--hosts", two.hosts, "--ssh", two.ssh, "--connect-timeout", "5"]
        with Launched(args=[*args, "--", *run_args(out)], folder=tmp_path) as run:
            run.wait_for_step(FAULT_STEP, out)
            two.disconnect()
            run.wait_for_output("restart 2 of 3")
            assert "can't reach the coordinator" in run.text
            two.reconnect()
            assert run.wait_for_exit() == 0, run.text
    check_complete_run(out, uninterrupted)
