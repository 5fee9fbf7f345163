"""Train models over a device mesh, explain or plan their shardings, manage checkpoints, calibrate the cost model and
launch multi-process programs."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from sharding.distributed import processes
from sharding.errors import ShardingError

from .broken_pipe import exits_if_reader_gone
from .config.calibrate_config import Calibrate
from .config.checkpoint_config import Checkpoint
from .config.explain_config import Explain
from .config.launch_config import Launch
from .config.plan_config import Plan
from .config.train_config import Train
from .exit_codes import INTERRUPTED, USER_ERROR

COMMANDS = {
    "train": Train,
    "explain": Explain,
    "plan": Plan,
    "checkpoint": Checkpoint,
    "calibrate": Calibrate,
    "launch": Launch,
}

Command = Train | Explain | Plan | Checkpoint | Calibrate | Launch


def main(args: Sequence[str] | None = None) -> None:
    """Run the command of `args`, by default those of the process."""
    try:
        with exits_if_reader_gone():
            _run(parse(args))
    except ShardingError as error:
        print(f"error: {error}", file=sys.stderr)
        _exit(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _exit(error: ShardingError) -> None:
    """Exit after a user error; immediately in a process that others would wait for."""
    code = processes.CONNECT_ERROR if isinstance(error, processes.ConnectError) else USER_ERROR
    processes.exit_if_multiprocess(code)
    sys.exit(code)


def parse(args: Sequence[str] | None = None) -> Command:
    """The command of `args`; prints help or an error and exits if there is none."""
    import tyro

    args = list(sys.argv[1:] if args is None else args)
    markers = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    commands: dict[str, Any] = dict(COMMANDS)
    if args[:1] == ["launch"] and "--" in args:
        # After `--` comes another program's command line.
        separator = args.index("--")
        args, command = args[:separator], tuple(args[separator + 1 :])
        commands["launch"] = functools.partial(Launch, command=command)
    return tyro.extras.subcommand_cli_from_dict(
        commands, prog="sharding", description=__doc__, args=args, config=markers
    )


def _run(command: Command) -> None:
    # The models take seconds to import: only once the options are known to be valid.
    if isinstance(command, Train):
        from .commands import train

        train.run(command)
    elif isinstance(command, Plan):
        from .commands import plan

        plan.run(command)
    elif isinstance(command, Checkpoint):
        from .commands import checkpoint

        checkpoint.run(command)
    elif isinstance(command, Calibrate):
        from .commands import calibrate

        calibrate.run(command)
    elif isinstance(command, Launch):
        from .commands import launch

        sys.exit(launch.run(command))
    else:
        from .commands import explain

        explain.run(command)
