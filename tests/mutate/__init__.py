"""Faults put into the library one at a time, to see whether its tests notice.

In: the source of `sharding/`, `models/` and `launch/`. Out: the share of a random sample that the tests catch, by room.
"""
