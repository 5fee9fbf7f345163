"""A program as the pass sees it: values and ops, flattened from a jaxpr."""

from .build import build
from .graph import CALLS, Atom, Graph, Group, Op, Pin, Scope, Site, joined, line, merged
from .groups import all_pins, pinned

__all__ = [
    "CALLS",
    "Atom",
    "Graph",
    "Group",
    "Op",
    "Pin",
    "Scope",
    "Site",
    "all_pins",
    "build",
    "joined",
    "line",
    "merged",
    "pinned",
]
