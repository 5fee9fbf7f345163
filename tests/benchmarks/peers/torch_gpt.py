"""The GPT of `models.gpt` in PyTorch, its train step on one device, and the harness for multi-process train steps.

Imports PyTorch and nothing of ours; runs in the environment of `environment`. The file that `gpt_workload.export`
writes holds the weights of a `models.gpt` (as many key and value heads as query heads) by path, and `tokens`
[steps, B, S + 1]. The model is the same function in idiomatic PyTorch: `Linear` layers and PyTorch's own attention,
norm and cross entropy kernels; with `--compile` each block goes through `torch.compile`, which needs a C++ compiler.

Each printed line is one configuration as JSON:
  - name, processes, threads, compiled: `single` is one process with the full batch;
  - step_seconds: one step with its optimizer update, from one barrier of all processes to the next;
    the first `--warmup` steps include PyTorch's one-time setup;
  - median_seconds: over the steps after warm-up;
  - losses: nats per token at each step, before its update.
With more threads than cores in total, steps take several times longer; the default of `--threads` avoids it.

Processes communicate through gloo on this machine. Shape suffixes as in `models.transformer`; O output features.
"""

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

Weights = dict[str, torch.Tensor]
"""Path in the flax model -> its values."""
Train = Callable[[torch.Tensor], float | None]
"""tokens [B, S + 1] of a step -> its loss, or None if another process has it."""
Trains = Callable[[str, Weights, argparse.Namespace], tuple[Train, bool]]
"""name, weights, arguments -> the train step of this process, and whether its blocks are compiled."""
SINGLE = "single"


class Block(nn.Module):
    """x_BSM -> x_BSM: an attention branch, then an MLP branch, each added to the residual stream."""

    def __init__(self, part: Weights, rotation: tuple[torch.Tensor, torch.Tensor] | None):
        super().__init__()
        qkv_MGND, out_HDM = part["attention/qkv"], part["attention/out"]
        features, _, in_group, self.head_features = qkv_MGND.shape
        if in_group != 3:
            raise ValueError(f"{in_group - 2} query heads per key and value head; grouped queries are not supported")
        self.norm1, self.norm2 = _norm(part["norm1/scale"]), _norm(part["norm2/scale"])
        self.qkv = _linear(qkv_MGND.flatten(1).T)
        self.out = _linear(out_HDM.reshape(-1, features).T)
        self.up, self.down = _linear(part["mlp/w1"].T), _linear(part["mlp/w2"].T)
        self.is_rotary = rotation is not None
        for name, table_SD in zip(("cos_SD", "sin_SD"), rotation or (), strict=False):
            self.register_buffer(name, table_SD, persistent=False)

    def forward(self, x_BSM: torch.Tensor) -> torch.Tensor:
        x_BSM = x_BSM + self.attention(self.norm1(x_BSM))
        return x_BSM + self.down(F.gelu(self.up(self.norm2(x_BSM)), approximate="tanh"))

    def attention(self, x_BSM: torch.Tensor) -> torch.Tensor:
        # The local number of heads: a tensor-parallel process has a shard of them.
        qkv_NBHSD = self.qkv(x_BSM).unflatten(-1, (-1, 3, self.head_features)).permute(3, 0, 2, 1, 4)
        q_BHSD, k_BHSD = qkv_NBHSD[:2]
        if self.is_rotary:
            a, b = qkv_NBHSD[:2].chunk(2, dim=-1)
            q_BHSD, k_BHSD = torch.cat((a * self.cos_SD - b * self.sin_SD, b * self.cos_SD + a * self.sin_SD), dim=-1)
        out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BHSD, qkv_NBHSD[2], is_causal=True)
        return self.out(out_BHSD.transpose(1, 2).flatten(2))


class Stage(nn.Module):
    """Blocks `first` to `last` (exclusive), with the embedding before the first block and the head after the last."""

    def __init__(self, weights: Weights, first: int, last: int, *, compiled: bool):
        super().__init__()
        positions_SM = weights.get("embed/positions")
        rotation = _rotation(weights) if positions_SM is None else None
        self.embed = _embedding(weights["embed/table"]) if first == 0 else None
        self.positions = _embedding(positions_SM) if first == 0 and positions_SM is not None else None
        self.blocks = nn.ModuleList(Block(_under(f"blocks/{i}/", weights), rotation) for i in range(first, last))
        if compiled:
            for block in self.blocks:
                block.compile()
        ends = last == num_layers(weights)
        self.norm = _norm(weights["final_norm/scale"]) if ends else None
        # A tied head needs the embedding in its own stage.
        is_tied = self.embed is not None and "head/table" not in weights
        self.head = _linear(weights["embed/table" if is_tied else "head/table"]) if ends else None
        if self.head is not None and self.embed is not None and is_tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_BSM = x if self.embed is None else self.embed(x)
        if self.positions is not None:
            x_BSM = x_BSM + self.positions.weight[: x.shape[1]]
        if torch.is_autocast_enabled(x_BSM.device.type):
            x_BSM = x_BSM.to(torch.get_autocast_dtype(x_BSM.device.type))  # the residual stream, as ours
        for block in self.blocks:
            x_BSM = block(x_BSM)
        return x_BSM if self.head is None or self.norm is None else self.head(self.norm(x_BSM))


def _rotation(weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    length, half = weights["tokens"].shape[-1] - 1, weights["blocks/0/attention/qkv"].shape[-1] // 2
    speed = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle_SD = torch.arange(length, dtype=torch.float32)[:, None] * speed
    return angle_SD.cos(), angle_SD.sin()


# Layers copy their weights, as several configurations start from the same ones.


def _embedding(table_VM: torch.Tensor) -> nn.Embedding:
    return nn.Embedding.from_pretrained(table_VM.clone(), freeze=False)


def _linear(weight_OM: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight_OM.shape[1], weight_OM.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight_OM.clone(memory_format=torch.contiguous_format))
    return layer


def _norm(scale_M: torch.Tensor) -> nn.RMSNorm:
    layer = nn.RMSNorm(scale_M.shape[0], eps=1e-6, device="meta")
    layer.weight = nn.Parameter(scale_M.clone())
    return layer


def _under(prefix: str, weights: Weights) -> Weights:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def num_layers(weights: Weights) -> int:
    return sum(name.endswith("/attention/qkv") for name in weights)


def loss_of(logits_BSV: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
    """Mean nats per token."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def adam_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Adam:
    # `fused` is the fastest of its three implementations on CPUs too: 21 ms for this model's 6.8 million parameters on
    # two busy x86 cores, where the others took 155 and 227.
    return torch.optim.Adam(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, fused=True)


# Steps.


def single(weights: Weights, *, compiled: bool) -> Train:
    """The full model on the full batch in this process."""
    model = Stage(weights, 0, num_layers(weights), compiled=compiled)
    adam = adam_of(model.parameters())

    def train(tokens: torch.Tensor) -> float:
        adam.zero_grad(set_to_none=True)
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        adam.step()
        return loss.item()

    return train


def timed(train: Train, tokens: torch.Tensor, ready: Callable[[], None]) -> tuple[list[float], list[float | None]]:
    """Time and loss of each step; `ready` is a barrier of all processes."""
    seconds, losses = [], []
    for batch in tokens:
        ready()
        begun = time.perf_counter()
        loss = train(batch)
        ready()
        seconds.append(time.perf_counter() - begun)
        losses.append(loss)
    return seconds, losses


def show(seconds: list[float], losses: list[Any], *, warmup: int, **what: Any) -> None:
    """Print one configuration as JSON."""
    found = {
        **what, "median_seconds": statistics.median(seconds[warmup:]), "step_seconds": seconds, "losses": losses,
        "torch": torch.__version__,
    }  # fmt: skip
    print(json.dumps(found), flush=True)


# Processes.


def read(path: str) -> Weights:
    """All arrays of the file; tokens as int64, PyTorch's index type."""
    with np.load(path) as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    return {**found, "tokens": found["tokens"].long()}


def process(rank: int, port: int, threads: int, trains: Trains, arguments: argparse.Namespace) -> None:
    """Runs one process through all requested configurations."""
    for name in (name for _, name in socket.if_nameindex() if name.startswith("lo")):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # else gloo looks up the machine's name, which may have none
    torch.set_num_threads(threads)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.processes)
    weights = read(arguments.file)
    for name in (name for name in arguments.names if name != SINGLE):
        train, compiled = trains(name, weights, arguments)
        seconds, losses = timed(train, weights["tokens"], dist.barrier)
        everyone: list[Any] = [None] * arguments.processes
        dist.all_gather_object(everyone, losses)
        if rank == 0:
            of_one = next(losses for losses in everyone if losses[0] is not None)
            what = {"name": name, "processes": arguments.processes, "threads": threads, "compiled": compiled}
            show(seconds, of_one, warmup=arguments.warmup, **what)
    dist.destroy_process_group()


def measure(trains: Trains, arguments: argparse.Namespace) -> None:
    """Measures the configurations in order and prints each when it is done."""
    if SINGLE in arguments.names:
        weights = read(arguments.file)
        seconds, losses = timed(single(weights, compiled=arguments.compile), weights["tokens"], lambda: None)
        what = {"name": SINGLE, "processes": 1, "threads": torch.get_num_threads(), "compiled": arguments.compile}
        show(seconds, losses, warmup=arguments.warmup, **what)
    if not set(arguments.names) - {SINGLE}:
        return
    # Fresh processes for each number of threads: a once larger thread pool slows down smaller ones.
    for threads in arguments.threads or [max(1, _num_cores() // arguments.processes)]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(process, args=(store.port, threads, trains, arguments), nprocs=arguments.processes)


def options(names: Sequence[str], description: str) -> argparse.ArgumentParser:
    """The arguments common to all scripts."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("file", help="weights and tokens")
    parser.add_argument("--names", nargs="+", choices=[SINGLE, *names], default=[SINGLE, *names])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument(
        "--threads", type=int, nargs="+", help="threads per process, one or more values; default: cores / processes"
    )
    parser.add_argument("--compile", action="store_true", help="compile the blocks if PyTorch can")
    parser.add_argument("--warmup", type=int, default=2, help="warm-up steps, not in the median")
    return parser


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
