"""Op strategies, and the rewriting of a program with sharding constraints so that XLA partitions it accordingly.

In: a closed jaxpr and its `Assignment`. Out: the same jaxpr with constraints.
"""
