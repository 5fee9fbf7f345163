"""What the exit codes of the command line mean."""

MISTAKE = 2
"""Exit code after a request that cannot be met."""

STOPPED = 130
"""Exit code after Ctrl-C that could not wait, as shells have it."""
