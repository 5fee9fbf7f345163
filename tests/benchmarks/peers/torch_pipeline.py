"""Train steps of a GPT in PyTorch on one device and with the schedules of `torch.distributed.pipelining`.

    python torch_pipeline.py gpt.npz                                              # one device, then every schedule
    python torch_pipeline.py gpt.npz --names gpipe 1f1b --threads 1 2 --compile

A standalone script; its input file, model and output are those of `torch_gpt`.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch_gpt import Stage, Train, Weights, adam_of, loss_of, measure, num_layers, options


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A schedule, and the stages of a process: (rank, number of processes) -> stage indices."""

    schedule: Callable[..., Any]
    stages: Callable[[int, int], tuple[int, ...]]
    compiles: bool = True
    """Whether its blocks may be compiled: PyTorch cannot split a compiled backward into input and weight gradients."""


KINDS = {
    "gpipe": Kind(schedule=pipelining.ScheduleGPipe, stages=lambda rank, _: (rank,)),
    "1f1b": Kind(schedule=pipelining.Schedule1F1B, stages=lambda rank, _: (rank,)),
    "interleaved": Kind(schedule=pipelining.ScheduleInterleaved1F1B, stages=lambda rank, p: (rank, p + rank)),
    "zbv": Kind(
        schedule=pipelining.ScheduleZBVZeroBubble, stages=lambda rank, p: (rank, 2 * p - 1 - rank), compiles=False
    ),
}


def pipelined(name: str, weights: Weights, arguments: argparse.Namespace) -> tuple[Train, bool]:
    """What this process does of a step: its stages, each with as many blocks as the others."""
    kind, processes = KINDS[name], dist.get_world_size()
    compiled = arguments.compile and kind.compiles
    indices = kind.stages(dist.get_rank(), processes)
    num_stages = len(indices) * processes
    modules = nn.ModuleList(Stage(weights, *_blocks(i, num_stages, weights), compiled=compiled) for i in indices)
    stages = [
        pipelining.PipelineStage(module, i, num_stages, torch.device("cpu"))
        for i, module in zip(indices, modules, strict=True)
    ]
    schedule = kind.schedule(stages if len(stages) > 1 else stages[0], arguments.microbatches, loss_fn=loss_of)
    adam = adam_of(modules.parameters())
    has_first, has_last = 0 in indices, num_stages - 1 in indices

    def train(tokens: torch.Tensor) -> float | None:
        adam.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        inputs = (tokens[:, :-1],) if has_first else ()
        targets = {"target": tokens[:, 1:], "losses": losses} if has_last else {}
        schedule.step(*inputs, **targets, return_outputs=False)
        adam.step()
        return torch.stack(losses).mean().item() if has_last else None

    return train, compiled


def _blocks(index: int, num_stages: int, weights: Weights) -> tuple[int, int]:
    per_stage, left = divmod(num_layers(weights), num_stages)
    if left:
        raise ValueError(f"{num_layers(weights)} layers must be a multiple of {num_stages} stages")
    return index * per_stage, (index + 1) * per_stage


if __name__ == "__main__":
    parser = options([*KINDS], __doc__ or "")
    parser.add_argument("--microbatches", type=int, default=8)
    measure(pipelined, parser.parse_args())
