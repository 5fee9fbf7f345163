"""Ray: the supervisor reaches a node's agent through an actor there, as through ssh elsewhere.

python -m sharding.launch.hosts.ray NODE GPUS    # an agent on that node, its stdin and stdout being this process's
"""

import importlib
import os
import queue
import subprocess
import sys
import threading
from typing import Any

from sharding import ShardingError

READ_SECONDS = 1.0


def nodes() -> list[tuple[str, str]]:
    """Id and address of every live node of the cluster, this one first.

    Raises:
        ShardingError: Ray is not installed, or this machine is not in a running cluster.
    """
    ray = _connected()
    here = ray.get_runtime_context().get_node_id()
    alive = [(node["NodeID"], node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
    ray.shutdown()
    return sorted(alive, key=lambda node: (node[0] != here, node[0]))


def main() -> None:
    """Forward lines between this process and the agent until the agent exits."""
    node, gpus = sys.argv[1], int(sys.argv[2])
    ray = _connected()
    where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    remote = ray.remote(num_cpus=0, num_gpus=gpus, max_concurrency=3)(RemoteAgent)
    agent = remote.options(scheduling_strategy=where).remote(
        [sys.executable, "-m", "sharding.launch.hosts.agent"], os.getcwd()
    )
    threading.Thread(target=_send, args=(ray, agent), daemon=True).start()
    while True:
        lines, ended = ray.get(agent.read.remote())
        sys.stdout.buffer.writelines(lines)
        sys.stdout.buffer.flush()
        if ended:
            return


def _send(ray: Any, agent: Any) -> None:
    for line in sys.stdin.buffer:
        ray.get(agent.write.remote(line))
    # The supervisor is gone: kill the agent and its processes.
    ray.kill(agent)
    os._exit(0)


class RemoteAgent:
    """An actor that runs an agent on its node."""

    def __init__(self, command: list[str], folder: str):
        # Ray sets CUDA_VISIBLE_DEVICES to the GPUs that the actor requested, and the agent's processes inherit it.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder)
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def write(self, line: bytes) -> None:
        """Send a line to the agent."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError:
            return

    def read(self) -> tuple[list[bytes], bool]:
        """New lines of the agent, after a second at most, and whether they are the last."""
        lines = []
        try:
            line = self._lines.get(timeout=READ_SECONDS)
            while line is not None:
                lines.append(line)
                line = self._lines.get_nowait()
        except queue.Empty:
            return lines, False
        return lines, True


def _connected() -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError:
        raise ShardingError(
            "sharding launch --ray",
            found="Ray is not installed",
            required="Ray on this machine and the other nodes",
            fix="pip install 'sharding-jax[ray]'",
        ) from None
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise ShardingError(
            "sharding launch --ray",
            found=str(error).splitlines()[0][:200],
            required="a running Ray cluster with this machine as a node",
            fix="ray start --head",
        ) from None
    return ray


if __name__ == "__main__":
    main()
