"""The network between two hosts is cut, and comes back."""

from pathlib import Path

import pytest
from clusters import namespaces
from groups import AT, Launched, check_whole, run_args


@pytest.mark.slow
def test_they_go_on_once_the_network_is_back(tmp_path: Path, undisturbed: list[float]):
    out = tmp_path / "run"
    with namespaces(tmp_path) as two:
        args = ["launch", "--hosts", two.hosts, "--ssh", two.ssh, "--connect-timeout", "5"]
        with Launched(args=[*args, "--", *run_args(out)], folder=tmp_path) as run:
            run.until_step(AT, out)
            two.cut()
            run.until_said("restart 2 of 3")
            assert "can't reach the coordinator" in run.text
            two.join()
            assert run.end() == 0, run.text
    check_whole(out, undisturbed)
