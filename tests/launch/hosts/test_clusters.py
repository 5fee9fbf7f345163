"""The same losses with every kind of cluster: one machine, ssh, Slurm, mpirun and Ray, on one host or two."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.clusters import namespaces, ray_cluster, slurm_cluster, ssh_server
from support.process_groups import Launched, run_args, uninterrupted_losses
from support.short_runs import losses

from sharding.launch import metrics

STEPS = 5


@pytest.fixture(scope="module")
def single_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    return uninterrupted_losses(tmp_path_factory.mktemp("alone"), steps=STEPS, every=0)


def args(out: Path) -> list[str]:
    return run_args(out, steps=STEPS, every=0)


def check(folder: Path, single_process: list[float], launch_args: Sequence[str], **started: object) -> str:
    """The output of a launch, after a check that its losses are those of one process."""
    out = folder / "run"
    with Launched(args=["launch", *launch_args, "--", *args(out)], folder=folder, **started) as run:
        assert run.wait_for_exit() == 0, run.text
    np.testing.assert_allclose(losses(metrics.read(out / metrics.FILE_NAME)), single_process, rtol=1e-5)
    return run.text


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_on_this_machine(count: int, tmp_path: Path, single_process: list[float]):
    output = check(tmp_path, single_process, ["--processes", str(count)])
    assert f"of {count} processes" in output


@pytest.mark.slow
def test_over_ssh(tmp_path: Path, single_process: list[float]):
    with ssh_server(tmp_path) as ssh:
        output = check(tmp_path, single_process, ["--hosts", "127.0.0.1,localhost", "--ssh", ssh])
    assert "of 2 processes" in output


@pytest.mark.slow
def test_on_two_nodes_of_slurm(tmp_path: Path, single_process: list[float]):
    with slurm_cluster(tmp_path) as slurm:
        out, batch = tmp_path / "run", tmp_path / "batch"
        batch.mkdir()
        options = ["--slurm", "--nodes", "2", "--name", "tiny", "--time", "00:10:00"]
        with Launched(
            args=["launch", *options, "--", *args(out)], folder=tmp_path, environment=slurm, cwd=batch
        ) as run:
            assert run.wait_for_exit() == 0, run.text
            job = run.text.split()[-1]
            log = batch / f"tiny-{job}.out"
            run.wait_until(lambda: _ended(job, slurm), "the job to end")
        assert "of 2 processes" in log.read_text(), log.read_text()
        np.testing.assert_allclose(losses(metrics.read(out / metrics.FILE_NAME)), single_process, rtol=1e-5)
        # With plain srun JAX detects the process number itself.
        script = [sys.executable, "-m", "sharding.launch", *args(tmp_path / "plain")]
        ran = subprocess.run(
            ["srun", "-N2", "-n2", *script], env=os.environ | slurm, capture_output=True, text=True, timeout=180
        )
        assert ran.returncode == 0, ran.stderr
        np.testing.assert_allclose(
            losses(metrics.read(tmp_path / "plain" / metrics.FILE_NAME)), single_process, rtol=1e-5
        )


def _ended(job: str, slurm: dict[str, str]) -> bool:
    listed = subprocess.run(["squeue", "--noheader", "--job", job], env=os.environ | slurm, capture_output=True)
    return not listed.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here: apt-get install openmpi-bin")
def test_by_mpirun(tmp_path: Path, single_process: list[float]):
    assert "of 2 processes" in check(tmp_path, single_process, ["--mpi", "--processes", "2"])


@pytest.mark.slow
def test_on_a_ray_cluster(tmp_path: Path, single_process: list[float]):
    with ray_cluster():
        assert "of 2 processes" in check(tmp_path, single_process, ["--ray", "--processes", "2"])


@pytest.mark.slow
def test_on_two_hosts_with_a_network_between_them(tmp_path: Path, single_process: list[float]):
    with namespaces(tmp_path) as two:
        assert "of 2 processes" in check(tmp_path, single_process, ["--hosts", two.hosts, "--ssh", two.ssh])
