"""What head and agents say to each other: JSON objects, a line each, over an agent's stdin and stdout."""

import json
from typing import Any

Message = dict[str, Any]
"""`is` names the kind. Head to agent: `start` (`processes`: one dict of `process` and `environment` each, `command`),
`alive`, `stop` (SIGTERM), `stacks` (SIGUSR1), `kill`. Agent to head: `ready` (`port`, a free one, and `name`),
`alive`, and of `process` its `up`, `step`, `compiling`, `working`, `finished`, `line` (`text`, `is_error`) and `exit`
(`code`, negative for a signal)."""

ALIVE_EVERY, ALIVE_TIMEOUT = 2.0, 10.0
"""Seconds between signs of life, and until the other side is given up."""

MARK = "\x1e"
"""Begins the lines of an agent, so that what else comes from a host's login is told apart."""


def written(message: Message) -> bytes:
    """A message as a line."""
    return (MARK + json.dumps(message) + "\n").encode()


def read(line: bytes) -> Message | None:
    """The message of a line; None for a line that is none."""
    text = line.decode(errors="replace")
    if not text.startswith(MARK):
        return None
    try:
        return json.loads(text[len(MARK) :])
    except json.JSONDecodeError:
        return None
