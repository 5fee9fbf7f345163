"""`sharding launch`: what to start and where, then the supervisor, a manifest or a batch script."""

import os
import shlex
import sys

from sharding import ShardingError

from ..launch_config import Launch
from . import clusters, kubernetes, slurm
from .lines import Lines
from .supervisor import Supervisor

OURS = ("train", "explain", "calibrate", "checkpoint")
"""Commands of `sharding` itself."""


def run(config: Launch) -> int:
    """Do what `config` asks for; the exit code of the program."""
    if config.kubernetes:
        print(kubernetes.manifest(config))
        return 0
    if config.slurm and not slurm.inside():
        return slurm.submit(config)
    command = started(config.command)
    hosts = clusters.hosts(config)
    if config.dry_run:
        for host in hosts:
            numbers = ", ".join(map(str, host.processes))
            print(f"{host.name}: processes {numbers}\n  {shlex.join(host.command)}")
        print(f"each process: {shlex.join(command)}")
        return 0
    lines = Lines(all_lines=config.all_lines, folder=config.logs)
    return Supervisor(config=config, hosts=hosts, command=command, lines=lines).run()


def started(command: tuple[str, ...]) -> list[str]:
    """What each process runs: a command of ours, a script by the Python that runs this, or what was said."""
    first = command[0]
    if first in OURS:
        return [sys.executable, "-m", "sharding.launch", *command]
    if first in ("python", "python3"):
        return [sys.executable, *command[1:]]
    if first.endswith(".py"):
        if not os.path.exists(first):
            raise ShardingError(f"sharding launch -- {first}", there="no such file", must="a script is there")
        return [sys.executable, *command]
    return list(command)
