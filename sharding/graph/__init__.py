"""The program graph that propagation runs on: values and ops of a flattened jaxpr.

In: a closed jaxpr and the annotations of its arguments and results. Out: a `Graph`.
"""

from .annotation import Annotation, joined, merged
from .build import build
from .derived_facts import DerivedFacts
from .graph import Atom, Graph, Group, Loop, Op, Scope, Site, Trips, line, trip_count
from .inlined_calls import CALLS
from .places import Places
from .sharding_groups import group_annotations, value_annotations

__all__ = [
    "CALLS",
    "Atom",
    "DerivedFacts",
    "Graph",
    "Group",
    "Loop",
    "Op",
    "Places",
    "Annotation",
    "Scope",
    "Site",
    "Trips",
    "value_annotations",
    "build",
    "joined",
    "line",
    "merged",
    "group_annotations",
    "trip_count",
]
