"""Planners that partition a model into pipeline stages. In: costs per layer, links. Out: stage sizes and placements.

``pipeline.cut`` needs only the layers' costs. The others also model communication, for chains of layers: ``pipedream``
for asynchronous pipelines, ``dapple`` and ``alpa`` for a step that ends with a flush, ``grid`` by simulation of
combinations. ``piper`` and ``place_ops`` take graphs. All are exact in their models. Times and bytes, measured or
estimated, are in units of your choice; bandwidths are in these bytes per these times.
"""

from .alpa_planner import Submesh, SubmeshCut, alpa, submeshes
from .cluster_planner import Allocation, Cluster, ClusterDevice, allocate
from .communication_times import Machines
from .dapple_planner import PlacedCut, dapple
from .device_clocks import DeviceOp, Execution, Value, interpret
from .device_placement import Placement, place_ops
from .downsets import chained
from .even_stages import Cut, cut
from .op_graph import OpGraph
from .parallelism_grid import GridPoint, LayerChain, grid
from .pipedream_partition import Level, ReplicatedCut, pipedream
from .pipedream_release import pipedream_released
from .piper_planner import HybridCut, HybridStage, LayerOption, piper
from .placement_program import place_ops_by_program
from .stage_placement import POLICIES, Policy
from .step_latency import Latency, Phase, latency

__all__ = [
    "POLICIES",
    "Allocation",
    "Cluster",
    "ClusterDevice",
    "Cut",
    "DeviceOp",
    "Execution",
    "GridPoint",
    "HybridCut",
    "HybridStage",
    "Latency",
    "LayerChain",
    "LayerOption",
    "Level",
    "Machines",
    "OpGraph",
    "Phase",
    "PlacedCut",
    "Placement",
    "Policy",
    "ReplicatedCut",
    "Submesh",
    "SubmeshCut",
    "Value",
    "allocate",
    "alpa",
    "chained",
    "cut",
    "dapple",
    "grid",
    "interpret",
    "latency",
    "pipedream",
    "pipedream_released",
    "piper",
    "place_ops",
    "place_ops_by_program",
    "submeshes",
]
