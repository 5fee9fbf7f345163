"""Real single-machine clusters as context managers; they skip the test where a cluster cannot be set up."""

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sharding.distributed.processes import free_port


def require_programs(*programs: str, package: str) -> None:
    """Tries to install missing programs; skips the test if that fails."""
    if all(shutil.which(program) for program in programs):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update"], **quiet)
        subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", *package.split()], env=env, **quiet)
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install {package}")


def _wait_until(condition, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.2)


@contextlib.contextmanager
def ssh_server(folder: Path) -> Iterator[str]:
    """An ssh command that connects to this machine."""
    require_programs("sshd", "ssh", "ssh-keygen", package="openssh-server openssh-client")
    keys = folder / "keys"
    keys.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    shutil.copy(keys / "user.pub", keys / "authorized_keys")
    Path("/run/sshd").mkdir(exist_ok=True)
    port = free_port()
    options = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": keys / "host",
        "AuthorizedKeysFile": keys / "authorized_keys",
        "StrictModes": "no",
        "PidFile": "none",
        "PermitUserEnvironment": "yes",
        "AcceptEnv": "*",
    }
    option_args = [text for name, value in options.items() for text in ("-o", f"{name}={value}")]
    server = subprocess.Popen(
        [shutil.which("sshd"), "-D", "-e", "-f", "/dev/null", *option_args], stderr=subprocess.DEVNULL
    )
    ssh = (
        f"ssh -p {port} -i {keys / 'user'} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
        "-o BatchMode=yes -o LogLevel=ERROR -o SendEnv=JAX_PLATFORMS -o SendEnv=TEST_GROUP"
    )
    try:
        probe = [*ssh.split(), "127.0.0.1", "true"]
        _wait_until(lambda: subprocess.run(probe, capture_output=True).returncode == 0, "sshd")
        yield ssh
    finally:
        server.kill()
        server.wait()


SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Environment variables that point Slurm commands at a two-node cluster."""
    require_programs("slurmctld", "slurmd", "munged", "srun", package="slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    home = folder / "slurm"
    for name in ("state", "spool.n1", "spool.n2"):
        (home / name).mkdir(parents=True)
    for each in (folder, *folder.parents):
        # munged requires that no one else can write to its socket's folder.
        if each.owner() == "root" and each != Path("/tmp"):
            with contextlib.suppress(PermissionError):
                each.chmod(each.stat().st_mode | stat.S_IXOTH | stat.S_IXGRP)
    key = home / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = home / "slurm.conf"
    ports = {name: free_port() for name in ("port", "first", "second")}
    conf.write_text(SLURM.format(host=socket.gethostname(), folder=home, **ports))
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={home}/munge.socket"]
    munged += [f"--pid-file={home}/munge.pid", f"--log-file={home}/munge.log", f"--seed-file={home}/munge.seed"]
    env = {"SLURM_CONF": str(conf)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": os.environ | env}
    daemons = []
    with _host_names({"n1": "127.0.0.1", "n2": "127.0.0.1"}):
        try:
            daemons.append(subprocess.Popen(munged, **quiet))
            _wait_until((home / "munge.socket").exists, "munged")
            daemons.append(subprocess.Popen(["slurmctld", "-D", "-f", conf], **quiet))
            daemons += [subprocess.Popen(["slurmd", "-D", "-f", conf, "-N", node], **quiet) for node in ("n1", "n2")]

            def idle() -> bool:
                sinfo = subprocess.run(
                    ["sinfo", "-h", "-o", "%D %t"], capture_output=True, text=True, env=os.environ | env
                )
                return sinfo.stdout.split() == ["2", "idle"]

            _wait_until(idle, f"two idle nodes, see {home}")
            yield env
        finally:
            subprocess.run(["scancel", "--user", "root"], **quiet)
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
                daemon.kill()


@contextlib.contextmanager
def _host_names(addresses: dict[str, str]) -> Iterator[None]:
    """Temporary entries in /etc/hosts."""
    hosts = Path("/etc/hosts")
    before = hosts.read_text()
    hosts.write_text(before + "".join(f"{address} {name}\n" for name, address in addresses.items()))
    try:
        yield
    finally:
        hosts.write_text(before)


@contextlib.contextmanager
def ray_cluster() -> Iterator[None]:
    """A single-node Ray cluster."""
    pytest.importorskip("ray", reason="Ray not found: pip install 'sharding-jax[ray]'")
    ray = str(Path(sys.executable).with_name("ray"))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    start = [ray, "start", "--head", "--num-cpus=4", f"--port={free_port()}", "--include-dashboard=false"]
    subprocess.run(start, check=True, **quiet)
    try:
        yield
    finally:
        subprocess.run([ray, "stop", "--force"], **quiet)


@dataclass(frozen=True, kw_only=True)
class Namespaces:
    """Two network namespaces that act as hosts."""

    ssh: str
    """Stand-in for ssh that runs a command on one of the hosts."""
    hosts: str
    """Host names in the format of --hosts."""
    name: str
    """Namespace of the second host."""

    def disconnect(self) -> None:
        """Cuts the network between the hosts."""
        ip("-n", self.name, "link", "set", f"v{self.name}", "down")

    def reconnect(self) -> None:
        """Restores the network."""
        ip("-n", self.name, "link", "set", f"v{self.name}", "up")


@contextlib.contextmanager
def namespaces(folder: Path) -> Iterator[Namespaces]:
    """Two connected network namespaces; skips the test where they cannot be created."""
    require_programs("ip", package="iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    tag = f"{os.getpid() % 10000}"
    names, addresses = [f"sa{tag}", f"sb{tag}"], ["10.77.0.1", "10.77.0.2"]
    ip(*f"link add v{names[0]} type veth peer name v{names[1]}".split())
    try:
        for name, address in zip(names, addresses, strict=True):
            ip("netns", "add", name)
            # As on Debian, the host's own name resolves to an address that other hosts cannot reach.
            etc = Path("/etc/netns") / name
            etc.mkdir(parents=True)
            etc.joinpath("hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
            ip("link", "set", f"v{name}", "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"v{name}")
            ip("-n", name, "link", "set", f"v{name}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        script = folder / "on_host"
        cases = "\n".join(f"  {address}) name={name};;" for name, address in zip(names, addresses, strict=True))
        script.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}\nesac\nshift\nexec ip netns exec "$name" sh -c "$*"\n')
        script.chmod(0o755)
        yield Namespaces(ssh=str(script), hosts=",".join(addresses), name=names[1])
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "delete", f"v{names[0]}"], stderr=subprocess.DEVNULL)


def ip(*args: str) -> None:
    """Runs iproute2's `ip`; skips the test if it fails."""
    result = subprocess.run(["ip", *args], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"network namespaces not available: ip {' '.join(args)}: {result.stderr.strip()}")
