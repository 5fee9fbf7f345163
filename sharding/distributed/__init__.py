"""Multi-process programs: initialization, checks across processes, heartbeats, and global arrays from local data.

In: environment variables or a coordinator's address, and local arrays. Out: an initialized `jax.distributed`, and
global arrays.
"""
