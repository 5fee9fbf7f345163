"""Programs on several hosts: what starts their processes, watches them, and starts them again after a fault.

One head runs where `sharding launch` was called. On every host an agent starts that host's processes, passes on what
they print and report, and kills them when the head says so or is no longer heard of. How the head reaches agents is all
that a kind of cluster is about; a fault is met in the same way on each: all processes are killed and started again, and
the program goes on from its newest checkpoint.
"""

from .run import run

__all__ = ["run"]
