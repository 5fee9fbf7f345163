"""Data sets that need no download.

In: seed, step and batch size. Out: batches of numpy arrays.
"""
