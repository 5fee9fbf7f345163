"""How much work Python code does, as a number that no other load of the machine changes."""

import cProfile
import pstats


def num_calls(f):
    """The number of calls of functions, Python's and C's, that a call of `f` makes."""
    profile = cProfile.Profile()
    profile.runcall(f)
    return pstats.Stats(profile).total_calls
