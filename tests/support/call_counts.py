"""How much work Python code does, as a number that no other load of the machine changes."""

import cProfile
import pstats
from collections import Counter


def num_calls(f):
    """The number of calls of functions, Python's and C's, that a call of `f` makes."""
    return calls_by_function(f).total()


def calls_by_function(f):
    """(file, line, name) of each function, Python's or C's, that a call of `f` calls -> how often."""
    profile = cProfile.Profile()
    profile.runcall(f)
    return Counter({function: calls for function, (_, calls, *_) in pstats.Stats(profile).stats.items()})
