"""Fuzzing: random programs on random meshes, compared with one device, or with what is predicted of them.

A case (`case`) is data: op records, mesh, specs, and how it is called. `elementwise`, `shapes`, `indexing`, `numbers`
and `control` define the ops, as do `memory_kinds` (the host's memory), `refs`, `callbacks` and `opaque` (ops without a
sharding rule); `training` layers whose weights are stored over the axes of the batch. `generate` builds random cases,
`check` runs a case on a mesh and on one device, `check_prediction` compares its predicted with its compiled
collectives, `shrink` minimises a failing one. `python -m tests.fuzz` runs many.
"""
