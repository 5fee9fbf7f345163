"""Annotations of a program's arrays: specs, sharding groups, propagation barriers and logical axis names.

In: calls in the user's program. Out: equations that carry the annotations, which `graph` reads.
"""
