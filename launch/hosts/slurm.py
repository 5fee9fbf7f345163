"""Slurm: a batch script that starts the launcher again, inside its allocation."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from sharding import ShardingError

from ..launch_config import Launch
from .clusters import need

NEEDED = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST")


def inside() -> bool:
    """Whether this is the first node of an allocation.

    Raises:
        ShardingError: a shell with half of Slurm's variables, as a login by ssh to a node of an allocation has them.
    """
    there = [name for name in NEEDED if name in os.environ]
    if there and len(there) < len(NEEDED):
        raise ShardingError(
            "sharding launch --slurm",
            there=f"of Slurm's variables only {', '.join(there)}: a login that Slurm did not make",
            must="the launcher runs in the batch script, or in a shell that salloc or srun --pty opened",
            fix="srun --jobid=$SLURM_JOB_ID --overlap --pty bash",
        )
    return bool(there)


def submit(config: Launch) -> int:
    """Write the batch script beside the user, and submit it; with --dry-run only print it."""
    text = script(config)
    if config.dry_run:
        print(text, end="")
        return 0
    need("sbatch", "--slurm", "Slurm's sbatch", fix="--dry-run prints the script")
    path = Path(f"{config.name}.sbatch")
    path.write_text(text)
    said = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
    if said.returncode:
        raise ShardingError(
            f"sbatch {path}", there=said.stderr.strip().splitlines()[-3:], must="Slurm takes the batch script"
        )
    print(f"{path}: {said.stdout.strip()}")
    return 0


def script(config: Launch) -> str:
    """The batch script. The launcher in it runs on the first node and reaches the others with srun."""
    options = {
        "job-name": config.name,
        "nodes": str(config.nodes or 1),
        "ntasks-per-node": "1",
        "output": "%x-%j.out",
        # The launcher hears of the end of its time before Slurm kills, and has all processes save.
        "signal": f"B:TERM@{round(config.grace) + 30}",
    }
    if config.time:
        options["time"] = config.time
    if config.gpus_per_host:
        options["gres"] = f"gpu:{config.gpus_per_host}"
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in options.items()), ""]
    # `exec`: the signal reaches the launcher itself.
    launcher = shlex.join([sys.executable, "-m", "sharding.launch", *again()])
    lines += [f"cd {shlex.quote(os.getcwd())}", f"exec {launcher}"]
    return "\n".join(lines) + "\n"


def again() -> list[str]:
    """The arguments of this launch, without those that the batch script has taken up."""
    args = list(sys.argv[1:])
    mark = args.index("--") if "--" in args else len(args)
    options, command = args[:mark], args[mark:]
    for taken in ("--time", "--name"):
        while taken in options:
            where = options.index(taken)
            del options[where : where + 2]
    return options + command
