"""Which processes run on which host, by which command, for every kind of cluster; no cluster is started."""

import os
import shlex
import socket
import stat
import sys
from pathlib import Path

import pytest

from sharding import ShardingError
from sharding.launch.config.launch_config import Launch
from sharding.launch.hosts import clusters, slurm
from sharding.launch.hosts.agent_channel import Host
from sharding.launch.hosts.agent_messages import MARK, decode, encode


def config(**options: object) -> Launch:
    return Launch(command=("train",), **options)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SHARDING_", "OMPI_", "PMI"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, the only one on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(folder: Path, name: str, script: str = "") -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(stat.S_IRWXU)


def numbers(hosts: list[Host]) -> dict[str, tuple[int, ...]]:
    return {host.name: host.processes for host in hosts}


def test_processes_are_numbered_host_by_host():
    """Every process once, in order, equally many on each host."""
    for num_hosts in range(1, 5):
        for count in range(1, 13):
            if count % num_hosts:
                with pytest.raises(ShardingError, match=f"found:    {num_hosts} hosts") as caught:
                    clusters._process_numbers(config(processes=count), num_hosts)
                ((option, near),) = [fix.split() for fix in caught.value.fix]
                assert option == "--processes" and int(near) % num_hosts == 0 and 0 < int(near) <= max(count, num_hosts)
                continue
            shares = clusters._process_numbers(config(processes=count), num_hosts)
            assert [process for share in shares for process in share] == list(range(count))
            assert {len(share) for share in shares} == {count // num_hosts}
        assert clusters._process_numbers(config(), num_hosts) == [(k,) for k in range(num_hosts)]
        shares = clusters._process_numbers(config(per="gpu", gpus_per_host=3), num_hosts)
        assert shares == [(3 * k, 3 * k + 1, 3 * k + 2) for k in range(num_hosts)]


def test_this_machine(monkeypatch: pytest.MonkeyPatch):
    assert numbers(clusters.hosts(config())) == {"this machine": (0, 1)}
    (host,) = clusters.hosts(config(processes=3))
    assert host.processes == (0, 1, 2) and host.address == "127.0.0.1" and not host.command_in_args
    monkeypatch.setenv("SHARDING_POD", "1")
    monkeypatch.setenv("SHARDING_PROCESS", "5")
    assert numbers(clusters.hosts(config(processes=3))) == {"this machine": (5,)}


def test_ssh(programs: Path):
    install(programs, "myssh")
    first, second = clusters.hosts(config(hosts="me@a, b", ssh="myssh -p 22", processes=4))
    assert (first.name, first.address, first.processes) == ("me@a", "a", (0, 1))
    assert (second.name, second.address, second.processes) == ("b", "b", (2, 3))
    assert first.command[:4] == ("myssh", "-p", "22", "me@a")
    remote = shlex.split(first.command[-1])
    assert remote[:2] == ["cd", os.getcwd()] and remote[-3:] == [sys.executable, "-m", "sharding.launch.hosts.agent"]


def test_slurm(monkeypatch: pytest.MonkeyPatch, programs: Path):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with pytest.raises(ShardingError, match="only SLURM_JOB_ID"):
        slurm.in_allocation()
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    assert slurm.in_allocation()
    install(programs, "srun")
    assert numbers(clusters.hosts(config(slurm=True))) == {"n1": (0,), "n2": (1,), "n3": (2,)}
    first, second = clusters.hosts(config(slurm=True, nodes=2, gpus_per_host=8, per="gpu"))
    assert (first.name, first.address, first.processes) == ("n1", "n1", tuple(range(8)))
    assert second.processes == tuple(range(8, 16))
    assert "--nodelist=n2" in second.command and "--gres=gpu:8" in second.command
    assert not any(part.startswith("--gres") for part in clusters.hosts(config(slurm=True))[0].command)
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    assert not slurm.in_allocation()


@pytest.mark.parametrize("brand", ["Open MPI", "HYDRA"])
def test_mpirun(brand: str, programs: Path):
    install(programs, "mpirun", f"echo 'mpirun ({brand}) 4.1'")
    for count in (1, 2, 4096):
        (host,) = clusters.hosts(config(mpi=True, processes=count))
        assert host.command_in_args and host.processes == tuple(range(count)) and host.address == socket.gethostname()
        at = host.command.index("-n")
        assert host.command[at : at + 2] == ("-n", str(count)) and host.command[at + 2] == sys.executable
        options = host.command[1:at]
        is_open = brand == "Open MPI"
        assert ("--allow-run-as-root" in options) == (is_open and os.geteuid() == 0)
        assert ("--oversubscribe" in options) == (is_open and count > (os.cpu_count() or 1))
    assert clusters.hosts(config(mpi=True))[0].processes == (0, 1)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"])
def test_the_rank_of_mpirun(name: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ShardingError, match="no rank in the environment"):
        clusters.mpi_rank()
    monkeypatch.setenv(name, "3")
    assert clusters.mpi_rank() == 3


def lines(monkeypatch: pytest.MonkeyPatch, args: str, **options: object) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["sharding", *args.split()])
    return slurm.script(config(**options)).splitlines()


def test_directives_of_a_batch_script(monkeypatch: pytest.MonkeyPatch):
    found = lines(monkeypatch, "launch --slurm -- train")
    directives = {line.removeprefix("#SBATCH --") for line in found if line.startswith("#SBATCH ")}
    assert {"nodes=1", "ntasks-per-node=1", "job-name=sharding"} <= directives
    # The signal comes 30 seconds before the processes' time to save begins to run out.
    assert "signal=B:TERM@150" in directives
    assert not any(directive.startswith(("time", "gres")) for directive in directives)
    found = lines(monkeypatch, "launch --slurm", nodes=3, grace=7.4, time="1:00", gpus_per_host=2, name="x")
    assert {f"#SBATCH --{text}" for text in ("nodes=3", "signal=B:TERM@37", "time=1:00", "gres=gpu:2")} <= {*found}
    assert found[0] == "#!/bin/bash" and found[-2] == f"cd {shlex.quote(os.getcwd())}"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (
            "launch --time 1:00 --slurm --name x --nodes 2 -- train --name y",
            "launch --slurm --nodes 2 -- train --name y",
        ),
        ("launch --name x --name y --slurm", "launch --slurm"),
        ("launch --slurm --time 1:00 -- --time 2:00", "launch --slurm -- --time 2:00"),
        ("launch --slurm -- train", "launch --slurm -- train"),
    ],
)
def test_arguments_of_the_launcher_in_a_batch_script(given: str, left: str, monkeypatch: pytest.MonkeyPatch):
    found = lines(monkeypatch, given)
    assert found[-1] == f"exec {sys.executable} -m sharding.launch {left}"


@pytest.mark.parametrize("code", [0, 1])
def test_submission(code: int, programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(programs)
    monkeypatch.setattr(sys, "argv", ["sharding", "launch", "--slurm", "--", "train"])
    with pytest.raises(ShardingError, match="no 'sbatch' on this machine's PATH"):
        slurm.submit(config(slurm=True, name="tiny"))
    install(programs, "sbatch", f"echo Submitted $1\nfor k in 1 2 3 4; do echo trouble $k >&2; done\nexit {code}")
    if code:
        with pytest.raises(ShardingError, match="a script that Slurm accepts") as caught:
            slurm.submit(config(slurm=True, name="tiny"))
        assert caught.value.found == ("trouble 2", "trouble 3", "trouble 4")
        return
    assert slurm.submit(config(slurm=True, name="tiny")) == 0
    assert capsys.readouterr().out == "tiny.sbatch: Submitted tiny.sbatch\n"
    assert (programs / "tiny.sbatch").read_text() == slurm.script(config(slurm=True, name="tiny"))


def test_messages_are_lines():
    message = {"is": "line", "process": 0, "text": "a\nb \u00e9", "is_error": False}
    line = encode(message)
    assert line.count(b"\n") == 1 and line.endswith(b"\n") and decode(line) == message
    for other in (b"Last login: today\n", b"{}\n", MARK.encode() + b"{\n", b""):
        assert decode(other) is None


@pytest.mark.parametrize(
    ("option", "least"),
    [
        *[(name, 1) for name in ("processes", "devices_per_process", "nodes")],
        *[(name, 0) for name in ("restarts", "gpus_per_host")],
        *[(name, 1) for name in ("step_timeout", "start_timeout", "connect_timeout", "grace")],
    ],
)
def test_least_values(option: str, least: int):
    assert getattr(config(**{option: least}), option) == least
    with pytest.raises(ShardingError, match=f"--{option.replace('_', '-')} {least - 1}") as caught:
        config(**{option: least - 1})
    assert caught.value.required == f"at least {least}"


def test_one_cluster_at_a_time():
    for name in ("slurm", "mpi", "kubernetes", "ray"):
        assert getattr(config(**{name: True}), name)
        with pytest.raises(ShardingError, match=f"--hosts --{name}"):
            config(hosts="a", **{name: True})
    assert config(hosts="a, me@b").host_names == ("a", "me@b") and config().host_names == ()
    assert config(coordinator="[::1]:80").coordinator == "[::1]:80"
