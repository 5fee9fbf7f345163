"""Exit codes of the command line."""

USER_ERROR = 2
"""A request that cannot be met."""

INTERRUPTED = 130
"""Ctrl-C without a checkpoint; the code that shells use."""

READER_GONE = 141
"""Standard output is a pipe whose reader is gone; the code that shells use."""
