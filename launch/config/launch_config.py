"""Options of `sharding launch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Suppress, arg

from sharding.distributed.processes import is_address
from sharding.errors import ShardingError

from .option_checks import at_least

CLUSTERS = ("hosts", "slurm", "mpi", "kubernetes", "ray")
"""The options that choose where processes run; each excludes the others."""

PerHost = Literal["host", "gpu"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Launch a multi-process program on one or many hosts and restart it after a failure:
    `sharding launch [options] -- train ...` or `-- python my_script.py ...`. A script only needs to call
    `sharding.initialize()`. Processes run on this machine unless --hosts, --slurm, --mpi, --kubernetes or --ray is
    given.
    """

    processes: int | None = None
    """Total number of processes. Default: one per host, or 2 on this machine."""
    devices_per_process: int | None = None
    """Virtual CPU devices per process. Default: for train as many as the mesh needs, else one."""
    hosts: Annotated[str | None, arg(metavar="A,B")] = None
    """Hosts to reach over ssh, as name, address or user@name. Process 0, the coordinator, runs on the first."""
    ssh: str = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=2"
    """Remote shell command for --hosts."""
    slurm: bool = False
    """Inside a Slurm allocation, start with srun; outside, write a batch script and submit it with sbatch."""
    mpi: bool = False
    """Start with mpirun."""
    kubernetes: bool = False
    """Print a JobSet manifest for kubectl apply -f -."""
    ray: bool = False
    """Start on the nodes of a Ray cluster (extra ray)."""
    nodes: int | None = None
    """Number of hosts, for --slurm, --kubernetes and --ray.
    Default: all hosts of the allocation or cluster; 1 for a batch script."""
    per: PerHost = "host"
    """One process per host, or one per GPU (--gpus-per-host of them on each host)."""
    gpus_per_host: int = 0
    """GPUs to request on each host, for --slurm, --kubernetes and --ray, and for --per gpu."""
    image: str = "sharding:latest"
    """Container image, for --kubernetes."""
    name: str = "sharding"
    """Job name, for --slurm and --kubernetes."""
    time: Annotated[str | None, arg(metavar="HH:MM:SS")] = None
    """Time limit of the batch job, for --slurm."""
    coordinator: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """Address of the coordinator, process 0. Default: the first host and a free port; 127.0.0.1 on this machine."""
    restarts: int = 3
    """Maximum restarts after failures."""
    step_timeout: float = 300.0
    """Seconds without a finished step or held-out batch after which processes count as hung, from the first step on.
    While a process compiles, the start timeout applies."""
    start_timeout: float | None = None
    """Seconds allowed until the first step finishes, compilation included. Default: no limit, since a script may report
    no steps."""
    connect_timeout: float = 30.0
    """Seconds to wait for a host to answer, and then for its processes to connect."""
    grace: float = 120.0
    """Seconds that processes have to save a checkpoint and exit after SIGTERM or Ctrl-C."""
    elastic: bool = False
    """If a host stays unreachable, continue on the remaining hosts."""
    logs: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder for the full output, one log file per process."""
    all_lines: bool = False
    """Print stdout of all processes, not only of process 0."""
    dry_run: bool = False
    """Print the commands and hosts without starting anything."""
    command: Suppress[tuple[str, ...]] = ()
    """The command after `--`."""

    def __post_init__(self) -> None:
        for name in ("processes", "devices_per_process", "nodes"):
            if getattr(self, name) is not None:
                at_least("--" + name.replace("_", "-"), getattr(self, name), 1)
        for name in ("restarts", "gpus_per_host"):
            at_least("--" + name.replace("_", "-"), getattr(self, name), 0)
        for name in ("step_timeout", "start_timeout", "connect_timeout", "grace"):
            if getattr(self, name) is not None:
                at_least("--" + name.replace("_", "-"), getattr(self, name), 1)
        if not self.command:
            raise ShardingError(
                "sharding launch",
                found="no command",
                required="a command after --",
                fix=["sharding launch --processes 2 -- train --mesh data=8", "sharding launch -- python my_script.py"],
            )
        self._check_cluster()

    def _check_cluster(self) -> None:
        chosen = [name for name in CLUSTERS if getattr(self, name)]
        if len(chosen) > 1:
            raise ShardingError(
                "sharding launch " + " ".join(f"--{name}" for name in chosen),
                required="at most one of " + ", ".join(f"--{name}" for name in CLUSTERS),
            )
        if self.hosts is not None and not all(self.host_names):
            raise ShardingError(f"--hosts {self.hosts}", required="host names separated by commas", fix="--hosts a,b")
        if len(set(self.host_names)) < len(self.host_names):
            raise ShardingError(f"--hosts {self.hosts}", required="distinct hosts")
        if self.per == "gpu" and not self.gpus_per_host:
            raise ShardingError("--per gpu", required="the number of GPUs per host", fix="--gpus-per-host 8")
        if self.coordinator is not None and not is_address(self.coordinator):
            raise ShardingError(
                f"--coordinator {self.coordinator}", required="host:port", fix="--coordinator 10.0.0.1:1234"
            )

    @property
    def host_names(self) -> tuple[str, ...]:
        """The hosts of --hosts."""
        return tuple(name.strip() for name in self.hosts.split(",")) if self.hosts is not None else ()
