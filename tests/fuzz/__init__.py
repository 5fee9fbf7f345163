"""Fuzzing: random programs on random meshes, compared with one device, or with what is predicted of them.

A case (`case`) is data: op records, mesh and specs. `elementwise`, `shapes`, `indexing`, `numbers` and `control` define
the ops, `generate` builds random cases, `check` runs a case on a mesh and on one device, `check_prediction` compares
its predicted with its compiled collectives, `shrink` minimises a failing one. `python -m tests.fuzz` runs many.
"""
