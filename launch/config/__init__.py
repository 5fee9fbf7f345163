"""The options of each command, as frozen dataclasses from which the command line is derived.

In: command-line arguments. Out: checked options, before any model is built.
"""
