"""A program as the pass sees it: values and ops, flattened from a jaxpr."""

from .build import build
from .graph import CALLS, Atom, Graph, Op, Pin, Scope, Site, joined, line, merged

__all__ = ["CALLS", "Atom", "Graph", "Op", "Pin", "Scope", "Site", "build", "joined", "line", "merged"]
