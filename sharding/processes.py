"""The processes of one program on several hosts: what they say to each other, and how they stop together.

`sharding.initialize` makes them one program; a launcher says to each in its environment which one it is.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import os
import socket
import sys
import time
import zlib
from base64 import b85decode, b85encode
from collections.abc import Iterator, Mapping
from typing import Any

from . import compat
from .errors import ShardingError

COORDINATOR, NUM_PROCESSES, PROCESS = "SHARDING_COORDINATOR", "SHARDING_NUM_PROCESSES", "SHARDING_PROCESS"
"""Environment variables in which a launcher says who this process is: `host:port`, and two numbers."""

CPU_DEVICES = "SHARDING_CPU_DEVICES"
"""Environment variable: how many virtual devices a process has on a CPU."""

LOCAL_DEVICE = "SHARDING_LOCAL_DEVICE"
"""Environment variable: the one device of its host that a process has."""

PULSE = "SHARDING_PULSE"
"""Environment variable: the file descriptor on which a process reports its steps."""

UP = "up"
"""What is reported before any step: that all processes have met."""

FINISHED = "finished"
"""What is reported behind the last step."""

COMPILING, WORKING = "compiling", "working"
"""What is reported before a program compiles, and for signs of life between steps."""

SIGNS = (UP, COMPILING, WORKING, FINISHED)
"""All that is reported besides the numbers of steps."""

CONNECT_TIMEOUT = "SHARDING_CONNECT_TIMEOUT"
"""Environment variable: seconds until processes that have not come are missing."""

ELASTIC = "SHARDING_ELASTIC"
"""Environment variable: whether there may be fewer devices than the mesh was written for."""

RESTART = "SHARDING_RESTART"
"""Environment variable: how often the program was started again after a fault."""

UNREACHED = 75
"""Exit code of a process that did not find the others: what BSD's sysexits calls a failure that may pass."""

_SAID_BYTES = 3 << 20
"""The coordinator takes messages of up to 4 MiB."""

_numbers = itertools.count()
"""Of meetings: all processes have the same ones in the same order."""

_answer_seconds = 600.0


class Unreached(ShardingError):
    """The other processes, or their coordinator, were not found in time."""


def index() -> int:
    """The number of this process; starts no backend."""
    return compat.distributed().process_id


def count() -> int:
    """The number of processes; starts no backend."""
    return compat.distributed().num_processes


def said(topic: str, text: str) -> list[str]:
    """What each process says on a topic, in their order. All call this, as often and in the same order.

    Raises:
        ShardingError: a process did not answer in time.
    """
    if count() == 1:
        return [text]
    client, key = compat.distributed().client, f"sharding/{next(_numbers)}"
    client.key_value_set(f"{key}/{index()}", f"{topic}\0{text}")
    deadline = time.monotonic() + _answer_seconds
    answers = [_answer(client, f"{key}/{other}", other, topic, deadline).split("\0", 1) for other in range(count())]
    elsewhere = [f"process {other} at {theirs!r}" for other, (theirs, _) in enumerate(answers) if theirs != topic]
    if elsewhere:
        raise ShardingError(
            f"process {index()} at {topic!r}", there=elsewhere, must="all processes do the same, in the same order"
        )
    return [text for _, text in answers]


def _answer(client: Any, key: str, other: int, topic: str, deadline: float) -> str:
    try:
        return client.blocking_key_value_get(key, max(1, int(1000 * (deadline - time.monotonic()))))
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
    raise Unreached(
        f"process {index()} at {topic!r}",
        there=[f"process {other} did not come here: {reason}"],
        must="all processes do the same, in the same order",
        fix="see where that process stands: its own lines, or `kill -USR1` for its stack",
    )


def barrier(name: str) -> None:
    """Wait until every process is here."""
    said(name, "")


def agree(facts: Mapping[str, str], *, about: str) -> None:
    """Compare facts with those of all other processes, before a difference becomes a hang.

    Args:
        facts: by name, what must be the same everywhere; a long text is compared by its hash first.
        about: what is going to be done, for the error.

    Raises:
        ShardingError: a process differs; says which one, in what, and for texts in which line.
    """
    if count() == 1:
        return
    names = sorted(facts)
    mine = [f"{name} {hashlib.sha256(facts[name].encode()).hexdigest()}" for name in names]
    table = [text.split("\n") for text in said(about, "\n".join(mine))]
    if all(row == table[0] for row in table):
        return
    texts = [_packed(row) for row in said(f"{about}: differences", _pack("\0".join(f"{n}\1{facts[n]}" for n in names)))]
    usual = max(table, key=table.count)
    first = table.index(usual)
    there = [
        line
        for other, row in enumerate(table)
        if row != usual
        for line in _differences(other, texts[other], first, texts[first])
    ]
    raise ShardingError(
        about,
        there=there,
        must="every process runs the same program with the same versions, flags, mesh and data",
        fix="the same environment and the same script on every host",
    )


def stops(step: int) -> bool:
    """Whether to save and stop before `step`, since some process was told to (SIGTERM): all hear it at the same step.

    Every process must ask before every step. Where there is one process, signals are its own affair.
    """
    if count() == 1:
        return False
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)


def done(step: int) -> None:
    """Report that `step` was finished, to the supervisor that started this process, if there is one.

    From the first report on it takes silence for a hang.
    """
    report(str(step))


def working() -> None:
    """Report a sign of life to the supervisor, in what takes long between two steps."""
    report(WORKING)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Report that this process compiles, which may take longer than the supervisor waits for a step."""
    report(COMPILING)
    try:
        yield
    finally:
        report(WORKING)


def finished() -> None:
    """Report that there are no more steps: what is still to do may take its time."""
    report(FINISHED)


def report(text: str) -> None:
    """Say something to the supervisor that started this process, if there is one."""
    if PULSE in os.environ:
        with contextlib.suppress(OSError):
            os.write(int(os.environ[PULSE]), f"{text}\n".encode())


def free_port(host: str = "") -> int:
    """A port of this host, or of one of its addresses, that nothing listens at."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


def leave(code: int) -> None:
    """End this process at once where others may wait for it in vain: JAX's own way out waits for all of them."""
    if count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _pack(text: str) -> str:
    packed = b85encode(zlib.compress(text.encode())).decode()
    return packed if len(packed) <= _SAID_BYTES else ""


def _packed(text: str) -> dict[str, str]:
    whole = zlib.decompress(b85decode(text)).decode() if text else ""
    return dict(part.split("\1", 1) for part in whole.split("\0") if part)


def _differences(other: int, theirs: Mapping[str, str], first: int, usual: Mapping[str, str]) -> list[str]:
    """In what one process differs from another, a line for each fact."""
    if not (theirs and usual):
        return [f"process {other} differs from process {first}, in texts too long to compare here"]
    lines = []
    for name in sorted(theirs.keys() | usual.keys()):
        one, two = theirs.get(name, ""), usual.get(name, "")
        if one != two:
            lines.append(f"process {other} differs from process {first} in {name}: {_first_difference(one, two)}")
    return lines


def _first_difference(one: str, two: str) -> str:
    old, new = two.splitlines(), one.splitlines()
    if len(old) <= 1 and len(new) <= 1:
        return f"{one or 'none'}, not {two or 'none'}"
    pairs = itertools.zip_longest(new, old, fillvalue="")
    number, (mine, theirs) = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    changed = sum(line[0] in "+-" for line in difflib.ndiff(old, new)) if len(old) + len(new) < 400 else 0
    more = f" ({changed} lines in all)" if changed > 2 else ""
    return f"line {number} is {mine.strip()[:120]!r}, not {theirs.strip()[:120]!r}{more}"
