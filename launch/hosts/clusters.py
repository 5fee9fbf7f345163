"""The hosts of a launch and the commands that start their agents, one function per kind of cluster."""

import os
import shlex
import shutil
import socket
import subprocess
import sys

from sharding import ShardingError
from sharding.distributed import processes

from ..config.launch_config import Launch
from .agent_channel import Host
from .kubernetes import POD
from .slurm_nodelist import expand_nodelist

AGENT = (sys.executable, "-m", "sharding.launch.hosts.agent")

HERE = "this machine"

MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""Environment variables that hold a process's rank: of Open MPI, of MPICH and Intel MPI, of PMIx."""


def hosts(config: Launch) -> list[Host]:
    """The hosts of `config`.

    Raises:
        ShardingError: the cluster's launcher is not installed, or the hosts don't exist.
    """
    if config.hosts is not None:
        return ssh_hosts(config)
    if config.slurm:
        return slurm_hosts(config)
    if config.mpi:
        return mpi_hosts(config)
    if config.ray:
        return ray_hosts(config)
    if POD in os.environ:
        return [Host(name=HERE, address="", command=AGENT, processes=(int(os.environ[processes.PROCESS]),))]
    return [Host(name=HERE, address="127.0.0.1", command=AGENT, processes=tuple(range(config.processes or 2)))]


def ssh_hosts(config: Launch) -> list[Host]:
    """The hosts of --hosts."""
    prefix, names = shlex.split(config.ssh), config.host_names
    shares = _process_numbers(config, len(names))
    require_program(prefix[0], "--hosts", "ssh")
    remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(AGENT)}"
    return [
        Host(name=name, address=name.rpartition("@")[2], command=(*prefix, name, remote), processes=share)
        for name, share in zip(names, shares, strict=True)
    ]


def slurm_hosts(config: Launch) -> list[Host]:
    """The nodes of the current Slurm allocation."""
    require_program("srun", "--slurm", "Slurm's srun")
    names = expand_nodelist(os.environ["SLURM_JOB_NODELIST"])[: config.nodes]
    # With one process per node or one per GPU, each sees all GPUs of the node, as NCCL requires.
    gpus = (f"--gres=gpu:{config.gpus_per_host}",) if config.gpus_per_host else ()
    command = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--quiet", "--unbuffered", "--kill-on-bad-exit=0", *gpus)
    return [
        Host(name=name, address=name, command=(*command, f"--nodelist={name}", *AGENT), processes=share)
        for name, share in zip(names, _process_numbers(config, len(names)), strict=True)
    ]


def ray_hosts(config: Launch) -> list[Host]:
    """The nodes of this machine's Ray cluster."""
    from . import ray

    found = ray.nodes()
    if config.nodes and len(found) < config.nodes:
        raise ShardingError(
            f"sharding launch --ray --nodes {config.nodes}",
            found=f"a cluster of {len(found)} nodes",
            required=f"at most {len(found)} nodes",
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
        for (node, address), share in zip(found, _process_numbers(config, len(found)), strict=True)
    ]


def mpi_hosts(config: Launch) -> list[Host]:
    """The hosts of mpirun, which assigns each process its rank; JAX reads it."""
    require_program("mpirun", "--mpi", "an MPI's mpirun")
    count, options = config.processes or 2, list[str]()
    if "Open" in subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout:
        # By default Open MPI rejects root, and more processes than cores.
        options += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        options += ["--oversubscribe"] if count > (os.cpu_count() or 1) else []
    return [
        Host(
            name="mpirun",
            address=socket.gethostname(),
            command=("mpirun", *options, "-n", str(count), *AGENT),
            processes=tuple(range(count)),
            command_in_args=True,
        )
    ]


def mpi_rank() -> int:
    """The rank of this process among those that mpirun started."""
    found = [os.environ[name] for name in MPI_RANKS if name in os.environ]
    if not found:
        raise ShardingError("--mpi", found="no rank in the environment", required=f"one of {', '.join(MPI_RANKS)}")
    return int(found[0])


def _process_numbers(config: Launch, num_hosts: int) -> list[tuple[int, ...]]:
    """The process numbers of each host."""
    count = config.gpus_per_host * num_hosts if config.per == "gpu" else config.processes or num_hosts
    if count % num_hosts:
        raise ShardingError(
            f"--processes {count}",
            found=f"{num_hosts} hosts",
            required="equally many processes per host",
            fix=f"--processes {num_hosts * max(1, count // num_hosts)}",
        )
    each = count // num_hosts
    return [tuple(range(first, first + each)) for first in range(0, count, each)]


def require_program(program: str, option: str, what: str, *, fix: str = "") -> None:
    """Raise an error if a program is not installed."""
    if shutil.which(program) is None:
        raise ShardingError(
            f"sharding launch {option}",
            found=f"no {program!r} on this machine's PATH",
            required=f"{what} on the machine of the launcher",
            fix=fix,
        )
