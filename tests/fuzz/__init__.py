"""Random programs on random meshes, held against one device.

A case (`case`) is data: a list of op records, the mesh, the specs. `grammar` says which ops there are, `generate` makes
cases of them, `check` runs one on a mesh and on one device, `shrink` makes a failing one small. `python -m tests.fuzz`
runs many.
"""
