"""Messages between supervisor and agents: JSON lines over an agent's stdin and stdout."""

import json
from typing import Any

Message = dict[str, Any]
"""`is` names the kind. Supervisor to agent: `start` (`processes`: dicts of `process` and `environment`; `command`),
`alive`, `stop` (SIGTERM), `stacks` (SIGUSR1), `kill`. Agent to supervisor: `ready` (`port`, a free one, and `name`),
`alive`, and for a `process` `up`, `step`, `compiling`, `working`, `finished`, `line` (`text`, `is_error`) and `exit`
(`code`, negative for a signal)."""

ALIVE_EVERY, ALIVE_TIMEOUT = 2.0, 10.0
"""Seconds between heartbeats, and without one until the other side counts as lost."""

MARK = "\x1e"
"""Starts a message line; other lines come from the host's login shell."""


def encode(message: Message) -> bytes:
    """A message as a line."""
    return (MARK + json.dumps(message) + "\n").encode()


def decode(line: bytes) -> Message | None:
    """The message of a line; None for other lines."""
    text = line.decode(errors="replace")
    if not text.startswith(MARK):
        return None
    try:
        return json.loads(text[len(MARK) :])
    except json.JSONDecodeError:
        return None
