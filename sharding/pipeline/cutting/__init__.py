"""Where to cut a model into the stages of a pipeline, and how many devices each gets: published planners, exact.

``pipeline.cut`` needs the layers' costs alone. The others weigh what crosses the links too: ``pipedream`` for pipelines
without flush, ``dapple`` for a step that ends with one. Times and bytes come from you, measured or estimated, in units
of your own: bandwidths are in these bytes per unit of these times.
"""

from .balance import Cut, cut
from .devices import POLICIES, Machines, Policy
from .hierarchy import Level, ReplicatedCut, pipedream
from .latency import Latency, Phase, latency
from .search import PlacedCut, dapple

__all__ = [
    "POLICIES",
    "Cut",
    "Latency",
    "Level",
    "Machines",
    "Phase",
    "PlacedCut",
    "Policy",
    "ReplicatedCut",
    "cut",
    "dapple",
    "latency",
    "pipedream",
]
