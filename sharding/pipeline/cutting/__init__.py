"""Planners that partition a model into pipeline stages. In: costs per layer, links. Out: stage sizes and placements.

``pipeline.cut`` needs only the layers' costs. The others also model communication: ``pipedream`` for asynchronous
pipelines, ``dapple`` for a step that ends with a flush. All are exact. Times and bytes, measured or estimated, are in
units of your choice; bandwidths are in these bytes per these times.
"""

from .communication_times import Machines
from .dapple_planner import PlacedCut, dapple
from .even_stages import Cut, cut
from .pipedream_partition import Level, ReplicatedCut, pipedream
from .stage_placement import POLICIES, Policy
from .step_latency import Latency, Phase, latency

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
