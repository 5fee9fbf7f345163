"""Slurm: a batch script that runs the launcher inside its allocation."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from sharding import ShardingError

from ..config.launch_config import Launch
from .clusters import require_program

NEEDED = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST")


def in_allocation() -> bool:
    """Whether this is the first node of an allocation.

    Raises:
        ShardingError: only some of Slurm's variables are set, as in an ssh login to a node of an allocation.
    """
    found = [name for name in NEEDED if name in os.environ]
    if found and len(found) < len(NEEDED):
        raise ShardingError(
            "sharding launch --slurm",
            found=f"of Slurm's variables only {', '.join(found)}: a login not made by Slurm",
            required="a batch script, or a shell opened by salloc or srun --pty",
            fix="srun --jobid=$SLURM_JOB_ID --overlap --pty bash",
        )
    return bool(found)


def submit(config: Launch) -> int:
    """Write the batch script to the current folder and submit it; with --dry-run only print it."""
    text = script(config)
    if config.dry_run:
        print(text, end="")
        return 0
    require_program("sbatch", "--slurm", "Slurm's sbatch", fix="--dry-run, to print the script")
    path = Path(f"{config.name}.sbatch")
    path.write_text(text)
    result = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
    if result.returncode:
        raise ShardingError(
            f"sbatch {path}",
            found=result.stderr.strip().splitlines()[-3:],
            required="a script that Slurm accepts",
        )
    print(f"{path}: {result.stdout.strip()}")
    return 0


def script(config: Launch) -> str:
    """The batch script; its launcher runs on the first node and reaches the others with srun."""
    options = {
        "job-name": config.name,
        "nodes": str(config.nodes or 1),
        "ntasks-per-node": "1",
        "output": "%x-%j.out",
        # Signal the launcher before the time limit, so that all processes save a checkpoint.
        "signal": f"B:TERM@{round(config.grace) + 30}",
    }
    if config.time:
        options["time"] = config.time
    if config.gpus_per_host:
        options["gres"] = f"gpu:{config.gpus_per_host}"
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in options.items()), ""]
    # `exec`: the signal reaches the launcher itself.
    launcher = shlex.join([sys.executable, "-m", "sharding.launch", *batch_args()])
    lines += [f"cd {shlex.quote(os.getcwd())}", f"exec {launcher}"]
    return "\n".join(lines) + "\n"


def batch_args() -> list[str]:
    """The arguments of this launch, without those that became directives of the batch script."""
    args = list(sys.argv[1:])
    separator = args.index("--") if "--" in args else len(args)
    options, command = args[:separator], args[separator:]
    for directive in ("--time", "--name"):
        while directive in options:
            index = options.index(directive)
            del options[index : index + 2]
    return options + command
