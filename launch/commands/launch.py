"""`sharding launch`: run a program under the supervisor, or write a job script or manifest for it."""

import os
import shlex
import sys

from sharding import ShardingError

from ..config.launch_config import Launch
from ..hosts import clusters, kubernetes, slurm
from ..hosts.process_output import ProcessOutput
from ..hosts.supervisor import Supervisor

SHARDING_COMMANDS = ("train", "explain", "plan", "calibrate", "checkpoint")
"""The other commands of `sharding`."""


def run(config: Launch) -> int:
    """Launch as `config` says; returns the program's exit code."""
    if config.kubernetes:
        print(kubernetes.manifest(config))
        return 0
    if config.slurm and not slurm.in_allocation():
        return slurm.submit(config)
    command = process_command(config.command)
    hosts = clusters.hosts(config)
    if config.dry_run:
        for host in hosts:
            numbers = ", ".join(map(str, host.processes))
            print(f"{host.name}: processes {numbers}\n  {shlex.join(host.command)}")
        print(f"each process: {shlex.join(command)}")
        return 0
    output = ProcessOutput(all_lines=config.all_lines, folder=config.logs)
    return Supervisor(config=config, hosts=hosts, command=command, output=output).run()


def process_command(command: tuple[str, ...]) -> list[str]:
    """The command of each process; `sharding` commands and Python scripts run under this interpreter."""
    first = command[0]
    if first in SHARDING_COMMANDS:
        return [sys.executable, "-m", "sharding.launch", *command]
    if first in ("python", "python3"):
        return [sys.executable, *command[1:]]
    if first.endswith(".py"):
        if not os.path.exists(first):
            raise ShardingError(f"sharding launch -- {first}", found="no such file", required="an existing script")
        return [sys.executable, *command]
    return list(command)
