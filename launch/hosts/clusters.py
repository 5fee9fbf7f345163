"""Where the agents of a program run, and by which commands: one function for each kind of cluster."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence

from sharding import ShardingError, processes

from ..launch_config import Launch
from .channel import Host
from .kubernetes import POD

AGENT = (sys.executable, "-m", "sharding.launch.hosts.agent")

HERE = "this machine"


def hosts(config: Launch, command: Sequence[str]) -> list[Host]:
    """The hosts that `config` asks for.

    Raises:
        ShardingError: what starts processes there is not installed, or no such hosts.
    """
    if config.hosts is not None:
        return over_ssh(config)
    if config.slurm:
        return over_slurm(config)
    if config.mpi:
        return over_mpi(config, command)
    if config.ray:
        return over_ray(config)
    if POD in os.environ:
        return [Host(name=HERE, address="", command=AGENT, processes=(int(os.environ[processes.PROCESS]),))]
    return [Host(name=HERE, address="127.0.0.1", command=AGENT, processes=tuple(range(config.processes or 2)))]


def over_ssh(config: Launch) -> list[Host]:
    """The hosts of --hosts."""
    prefix = shlex.split(config.ssh)
    _need(prefix[0], "--hosts", "ssh")
    remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(AGENT)}"
    names = config.host_names
    each = per_host(config, len(names))
    return [
        Host(
            name=name,
            address=name.rpartition("@")[2],
            command=(*prefix, name, remote),
            processes=tuple(range(place * each, place * each + each)),
        )
        for place, name in enumerate(names)
    ]


def over_slurm(config: Launch) -> list[Host]:
    """The nodes of the allocation around."""
    _need("srun", "--slurm", "Slurm's srun")
    names = expanded(os.environ["SLURM_JOB_NODELIST"])[: config.nodes]
    each = per_host(config, len(names))
    # One process for all GPUs of a node, or each its own: either way all of them see all GPUs, as NCCL needs it.
    gpus = (f"--gres=gpu:{config.gpus_per_host}",) if config.gpus_per_host else ()
    command = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--quiet", "--unbuffered", "--kill-on-bad-exit=0", *gpus)
    return [
        Host(
            name=name,
            address=name,
            command=(*command, f"--nodelist={name}", *AGENT),
            processes=tuple(range(place * each, place * each + each)),
        )
        for place, name in enumerate(names)
    ]


def over_ray(config: Launch) -> list[Host]:
    """The nodes of the Ray cluster that this machine is in."""
    from . import ray

    found = ray.nodes()
    if config.nodes and len(found) < config.nodes:
        raise ShardingError(
            f"sharding launch --ray --nodes {config.nodes}",
            there=f"a cluster of {len(found)} nodes",
            must="the cluster has so many",
            fix=f"--nodes {len(found)}",
        )
    found = found[: config.nodes]
    each = per_host(config, len(found))
    return [
        Host(
            name=f"{address} ({node[:8]})",
            address=address,
            command=(sys.executable, "-m", "sharding.launch.hosts.ray", node, str(config.gpus_per_host)),
            processes=tuple(range(place * each, place * each + each)),
        )
        for place, (node, address) in enumerate(found)
    ]


def over_mpi(config: Launch, command: Sequence[str]) -> list[Host]:
    """Whatever mpirun starts on: it says to each process which one it is, and JAX reads that."""
    _need("mpirun", "--mpi", "an MPI's mpirun")
    count = config.processes or 2
    root = ("--allow-run-as-root",) if os.geteuid() == 0 and _is_open_mpi() else ()
    environment = ("env", *_exported(config))
    mpirun = ("mpirun", *root, *_fewer_cores(count), "-n", str(count), *environment)
    return [
        Host(
            name="mpirun",
            address=socket.gethostname(),
            command=(*mpirun, *AGENT, "--", *command),
            processes=tuple(range(count)),
            starts_itself=True,
        )
    ]


def per_host(config: Launch, num_hosts: int) -> int:
    """How many processes each host gets."""
    if config.per == "gpu":
        return config.gpus_per_host
    count = config.processes or num_hosts
    if count % num_hosts:
        raise ShardingError(
            f"--processes {count}",
            there=f"{num_hosts} hosts",
            must="every host gets the same number of processes",
            fix=f"--processes {num_hosts * max(1, count // num_hosts)}",
        )
    return count // num_hosts


def expanded(nodes: str) -> list[str]:
    """The names that Slurm writes as one: `n[1-3,7],login`."""
    found = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)?", nodes):
        whole = re.fullmatch(r"([^\[]+)(?:\[([^\]]*)\])?(.*)", part)
        assert whole is not None
        head, ranges, tail = whole.groups()
        if ranges is None:
            found.append(part)
            continue
        for each in ranges.split(","):
            low, _, high = each.partition("-")
            numbers = range(int(low), int(high or low) + 1)
            found += [f"{head}{number:0{len(low)}d}{tail}" for number in numbers]
    return found


def _need(program: str, option: str, what: str) -> None:
    if shutil.which(program) is None:
        raise ShardingError(
            f"sharding launch {option}",
            there=f"no {program!r} on this machine's PATH",
            must=f"{what} is installed where the launcher runs",
        )


def _is_open_mpi() -> bool:
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True)
    return "Open MPI" in said.stdout or "Open RTE" in said.stdout


def _fewer_cores(count: int) -> tuple[str, ...]:
    """Open MPI refuses more processes than cores unless it is told to."""
    return ("--oversubscribe",) if _is_open_mpi() and count > (os.cpu_count() or 1) else ()


def _exported(config: Launch) -> list[str]:
    variables = {processes.CONNECT_TIMEOUT: str(config.connect_timeout)}
    if config.devices_per_process:
        variables[processes.CPU_DEVICES] = str(config.devices_per_process)
    return [f"{name}={value}" for name, value in variables.items()]
