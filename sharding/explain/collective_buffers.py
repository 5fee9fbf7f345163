"""Memory that a communication library keeps for a program's collectives, outside XLA's own.

NCCL keeps buffers per communicator, channel and connected peer (NVIDIA/nccl, `src/init.cc` and `src/transport/p2p.cc`).
For all-to-alls of 8 H100s this says 2.8 GB, and 3.3 GB were measured (NVIDIA/nccl, issue 1685).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..hardware import Platform
from ..memory import Usage
from ..memory.instruction import all_instructions
from ..spec import axis_size

CONNECTION_BYTES = 12 * 2**20
"""To receive 4 MiB (`NCCL_BUFFSIZE`), 0.5 and 4.7 MiB, one for each protocol and 10 MiB in all, and 2 MiB to send."""
RING_CHANNELS, PEER_CHANNELS = 24, 32
"""Of collectives, and of each pair of devices that send to each other, as NCCL logs them for a host of 8 H100s."""
MOST_PEERS = 7
"""Of one host; the peers on other hosts share one buffer."""
RING = frozenset({"all-gather", "all-reduce", "reduce-scatter"})


def collective_buffer_bytes(usage: Usage, sizes: Mapping[str, int], platform: Platform) -> int:
    """Bytes per device of all communicators of a program, one per set of mesh axes; 0 on other platforms than GPUs."""
    if platform != "gpu":
        return 0
    rings, peers = set[frozenset[Any]](), dict[frozenset[Any], int]()
    for one in all_instructions(usage.program.body):
        axes = frozenset(one.axes)
        if axes and one.name in RING:
            rings.add(axes)
        elif axes and one.name in ("all-to-all", "collective-permute"):
            num_devices = math.prod(axis_size(axis, sizes) for axis in axes)
            num_peers = min(num_devices - 1, MOST_PEERS) if one.name == "all-to-all" else 1
            peers[axes] = max(peers.get(axes, 0), num_peers)
    return CONNECTION_BYTES * (RING_CHANNELS * len(rings) + PEER_CHANNELS * sum(peers.values()))
