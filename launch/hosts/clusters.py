"""Where the agents of a program run, and by which commands: one function for each kind of cluster."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys

from sharding import ShardingError, processes

from ..launch_config import Launch
from .channel import Host
from .kubernetes import POD

AGENT = (sys.executable, "-m", "sharding.launch.hosts.agent")

HERE = "this machine"


def hosts(config: Launch) -> list[Host]:
    """The hosts that `config` asks for.

    Raises:
        ShardingError: what starts processes there is not installed, or no such hosts.
    """
    if config.hosts is not None:
        return over_ssh(config)
    if config.slurm:
        return over_slurm(config)
    if config.mpi:
        return over_mpi(config)
    if config.ray:
        return over_ray(config)
    if POD in os.environ:
        return [Host(name=HERE, address="", command=AGENT, processes=(int(os.environ[processes.PROCESS]),))]
    return [Host(name=HERE, address="127.0.0.1", command=AGENT, processes=tuple(range(config.processes or 2)))]


def over_ssh(config: Launch) -> list[Host]:
    """The hosts of --hosts."""
    prefix, names = shlex.split(config.ssh), config.host_names
    shares = _shares(config, len(names))
    need(prefix[0], "--hosts", "ssh")
    remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(AGENT)}"
    return [
        Host(name=name, address=name.rpartition("@")[2], command=(*prefix, name, remote), processes=share)
        for name, share in zip(names, shares, strict=True)
    ]


def over_slurm(config: Launch) -> list[Host]:
    """The nodes of the allocation around."""
    need("srun", "--slurm", "Slurm's srun")
    names = expanded(os.environ["SLURM_JOB_NODELIST"])[: config.nodes]
    # One process for all GPUs of a node, or each its own: either way all of them see all GPUs, as NCCL needs it.
    gpus = (f"--gres=gpu:{config.gpus_per_host}",) if config.gpus_per_host else ()
    command = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--quiet", "--unbuffered", "--kill-on-bad-exit=0", *gpus)
    return [
        Host(name=name, address=name, command=(*command, f"--nodelist={name}", *AGENT), processes=share)
        for name, share in zip(names, _shares(config, len(names)), strict=True)
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
    return [
        Host(
            name=f"{address} ({node[:8]})",
            address=address,
            command=(sys.executable, "-m", "sharding.launch.hosts.ray", node, str(config.gpus_per_host)),
            processes=share,
        )
        for (node, address), share in zip(found, _shares(config, len(found)), strict=True)
    ]


def over_mpi(config: Launch) -> list[Host]:
    """Whatever mpirun starts on: it says to each process which one it is, and JAX reads that."""
    need("mpirun", "--mpi", "an MPI's mpirun")
    count, options = config.processes or 2, list[str]()
    if "Open" in subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout:
        # Open MPI refuses both unless it is told to: the superuser, and more processes than cores.
        options += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        options += ["--oversubscribe"] if count > (os.cpu_count() or 1) else []
    return [
        Host(
            name="mpirun",
            address=socket.gethostname(),
            command=("mpirun", *options, "-n", str(count), *AGENT),
            processes=tuple(range(count)),
            starts_itself=True,
        )
    ]


def _shares(config: Launch, num_hosts: int) -> list[tuple[int, ...]]:
    """The numbers of each host's processes."""
    count = config.gpus_per_host * num_hosts if config.per == "gpu" else config.processes or num_hosts
    if count % num_hosts:
        raise ShardingError(
            f"--processes {count}",
            there=f"{num_hosts} hosts",
            must="every host gets the same number of processes",
            fix=f"--processes {num_hosts * max(1, count // num_hosts)}",
        )
    each = count // num_hosts
    return [tuple(range(first, first + each)) for first in range(0, count, each)]


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


def need(program: str, option: str, what: str, *, fix: str = "") -> None:
    """Raise an error if a program is not installed."""
    if shutil.which(program) is None:
        raise ShardingError(
            f"sharding launch {option}",
            there=f"no {program!r} on this machine's PATH",
            must=f"{what} is installed where the launcher runs",
            fix=fix,
        )
