"""Reference models, architecture only, and the layouts that shard their parameters over mesh axes.

In: a configuration and batches. Out: flax nnx modules and losses, and the PartitionSpecs of `layouts`.
"""
