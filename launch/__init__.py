"""The command line: `sharding train` trains a model over a mesh, `sharding explain` shows how it would be split,
`sharding checkpoint` looks into what was saved, `sharding calibrate` measures this machine for estimates, `sharding
launch` starts processes here or on many hosts."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from sharding import processes
from sharding.errors import ShardingError

from .checkpoint_config import Checkpoint
from .config import Calibrate, Explain, Train
from .exit_codes import MISTAKE, STOPPED
from .launch_config import Launch

COMMANDS = {"train": Train, "explain": Explain, "checkpoint": Checkpoint, "calibrate": Calibrate, "launch": Launch}

Command = Train | Explain | Checkpoint | Calibrate | Launch


def main(args: Sequence[str] | None = None) -> None:
    """Run the command that `args`, by default those of the process, ask for."""
    try:
        _run(parse(args))
    except ShardingError as error:
        print(f"error: {error}", file=sys.stderr)
        _leave(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(STOPPED)


def _leave(error: ShardingError) -> None:
    """End after a mistake; a process that others would wait for ends at once."""
    code = processes.UNREACHED if isinstance(error, processes.Unreached) else MISTAKE
    processes.leave(code)
    sys.exit(code)


def parse(args: Sequence[str] | None = None) -> Command:
    """The command that `args` describe. Prints help or what is wrong, and exits, where they describe none."""
    import tyro

    args = list(sys.argv[1:] if args is None else args)
    markers = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    commands: dict[str, Any] = dict(COMMANDS)
    if args[:1] == ["launch"] and "--" in args:
        # What follows is another program's command line.
        mark = args.index("--")
        args, command = args[:mark], tuple(args[mark + 1 :])
        commands["launch"] = functools.partial(Launch, command=command)
    return tyro.extras.subcommand_cli_from_dict(
        commands, prog="sharding", description=__doc__, args=args, config=markers
    )


def _run(command: Command) -> None:
    # JAX and the models take seconds to import: only once the request is known to make sense.
    if isinstance(command, Train):
        from . import train

        train.run(command)
    elif isinstance(command, Checkpoint):
        from . import checkpoints

        checkpoints.run(command)
    elif isinstance(command, Calibrate):
        from . import calibrate

        calibrate.run(command)
    elif isinstance(command, Launch):
        from . import hosts

        sys.exit(hosts.run(command))
    else:
        from . import explain

        explain.run(command)
