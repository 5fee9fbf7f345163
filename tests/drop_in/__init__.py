"""Features of `jax.jit`, each a small program that runs under `jax.jit` on one device and `sharding.jit` on a mesh.

A module is a topic, a public function in it a feature: it takes `jit` and returns a pytree of what it saw, and the
first line of its docstring is its row in the table of `README.md`, which `python -m tests.drop_in` writes.
"""
