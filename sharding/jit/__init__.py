"""`sharding.jit`: trace, infer shardings, rewrite, compile and dispatch.

In: a function of pytrees of arrays, and specs. Out: a function that runs over the current mesh.
"""

from .jit import Jitted, jit

__all__ = ["Jitted", "jit"]
