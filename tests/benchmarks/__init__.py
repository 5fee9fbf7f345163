"""Benchmarks: `python -m tests.benchmarks.NAME --help` tells what each measures and against what.

A module measures, names its result in one line (`summary`) and, where every row is of interest, in a Markdown table
(`table`). `result_file` is the format they share, `figures` writes the README's table from the stored files.
"""
