"""What `sharding launch` asks for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Suppress, arg

from sharding.errors import ShardingError

from .options import at_least

CLUSTERS = ("hosts", "slurm", "mpi", "kubernetes", "ray")

PerHost = Literal["host", "gpu"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Start the processes of one program, here or on other hosts, and start them again after a fault:
    `sharding launch [options] -- train ...` or `-- python my_script.py ...`, where `sharding.initialize()` is all that
    a script needs. Without --hosts, --slurm, --mpi, --kubernetes and --ray all run on this machine.
    """

    processes: int | None = None
    """How many processes in all. Default: one for each host, and 2 on this machine."""
    devices_per_process: int | None = None
    """Virtual devices of each process on CPUs. Default: for train what the mesh needs, else one."""
    hosts: Annotated[str | None, arg(metavar="A,B")] = None
    """Hosts to start on over ssh, by name, address or user@name; the first one's process 0 coordinates."""
    ssh: str = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=2"
    """The command that runs another one on a host, with --hosts."""
    slurm: bool = False
    """Start with srun inside an allocation; outside of one write a batch script and submit it."""
    mpi: bool = False
    """Start with mpirun."""
    kubernetes: bool = False
    """Print a JobSet's manifest, for kubectl apply -f -."""
    ray: bool = False
    """Start on the nodes of a Ray cluster (extra ray)."""
    nodes: int | None = None
    """How many hosts of a cluster, for --slurm, --kubernetes and --ray. Default: all that there are; for a batch
    script 1."""
    per: PerHost = "host"
    """One process per host, or one per GPU of a host, as many as --gpus-per-host."""
    gpus_per_host: int = 0
    """GPUs that are asked for on each host, for --slurm, --kubernetes and --ray, and for --per gpu."""
    image: str = "sharding:latest"
    """Container to run, with --kubernetes."""
    name: str = "sharding"
    """Of the job, for --slurm and --kubernetes."""
    time: Annotated[str | None, arg(metavar="HH:MM:SS")] = None
    """Time limit of the batch job, with --slurm."""
    coordinator: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """Where process 0 listens. Default: the first host at a free port; on this machine 127.0.0.1."""
    restarts: int = 3
    """How often the processes are started again after a fault."""
    step_timeout: float = 300.0
    """Seconds without a finished step or held-out batch, once one was, after which processes are taken to hang; for
    compiling they have the time of the start."""
    start_timeout: float | None = None
    """Seconds until the first step is finished, compiling included. Default: no limit, as of a script that reports no
    steps."""
    connect_timeout: float = 30.0
    """Seconds until a host, and then its processes, must have answered."""
    grace: float = 120.0
    """Seconds that processes have to save and stop after SIGTERM or Ctrl-C."""
    elastic: bool = False
    """With a host gone for good, go on with those that are left."""
    logs: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder for every line of every process, in a file each."""
    all_lines: bool = False
    """Show what all processes print, not only process 0 and errors."""
    dry_run: bool = False
    """Print what would run, and where."""
    command: Suppress[tuple[str, ...]] = ()
    """What to run: behind `--`."""

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
                there="no command",
                must="what to run stands behind --",
                fix=["sharding launch --processes 2 -- train --mesh data=8", "sharding launch -- python my_script.py"],
            )
        self._check_cluster()

    def _check_cluster(self) -> None:
        named = [name for name in CLUSTERS if getattr(self, name)]
        if len(named) > 1:
            raise ShardingError(
                "sharding launch " + " ".join(f"--{name}" for name in named), must="one kind of cluster is asked for"
            )
        if self.hosts is not None and not all(self.host_names):
            raise ShardingError(
                f"--hosts {self.hosts}", must="hosts are names with commas between them", fix="--hosts a,b"
            )
        if len(set(self.host_names)) < len(self.host_names):
            raise ShardingError(f"--hosts {self.hosts}", must="each host is named once")
        if self.per == "gpu" and not self.gpus_per_host:
            raise ShardingError("--per gpu", must="it is said how many GPUs a host has", fix="--gpus-per-host 8")
        if self.coordinator is not None and not self.coordinator.rpartition(":")[2].isdigit():
            raise ShardingError(
                f"--coordinator {self.coordinator}", must="it is host:port", fix="--coordinator 10.0.0.1:1234"
            )

    @property
    def host_names(self) -> tuple[str, ...]:
        """The hosts of --hosts."""
        return tuple(name.strip() for name in self.hosts.split(",")) if self.hosts is not None else ()
