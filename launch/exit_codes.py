"""Exit codes of the command line."""

USER_ERROR = 2
"""A request that cannot be met."""

INTERRUPTED = 130
"""Ctrl-C without a checkpoint; the code that shells use."""
