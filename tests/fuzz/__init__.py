"""Fuzzing: random programs on random meshes, compared with one device.

A case (`case`) is data: op records, mesh and specs. `elementwise`, `shapes`, `indexing`, `numbers` and `control` define
the ops, `generate` builds random cases, `check` runs a case on a mesh and on one device, `shrink` minimises a failing
one. `python -m tests.fuzz` runs many.
"""
