"""Train steps of a GPT in PyTorch whose batch (DDP), parameters (FSDP2) or layers (DTensor) several processes split.

    python torch_axes.py gpt.npz                                   # one device, then each of them
    python torch_axes.py gpt.npz --names data --threads 1 --compile

A script of its own; the file that it reads, the model and what it prints are those of `torch_gpt`.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch_gpt import Stage, Train, Weights, adam_of, loss_of, measure, num_layers, options


def whole(weights: Weights, *, compiled: bool) -> Stage:
    """All blocks with both ends."""
    return Stage(weights, 0, num_layers(weights), compiled=compiled)


def data(weights: Weights, *, compiled: bool) -> Train:
    """Each process has all parameters and a part of the batch."""
    return _of_rows(DistributedDataParallel(whole(weights, compiled=compiled)))


def fsdp(weights: Weights, *, compiled: bool) -> Train:
    """Each process has a part of each parameter and of the batch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = whole(weights, compiled=compiled)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return _of_rows(fully_shard(model, mesh=mesh))


def _of_rows(model: nn.Module) -> Train:
    adam, rank, processes = adam_of(model.parameters()), dist.get_rank(), dist.get_world_size()

    def train(tokens: torch.Tensor) -> float:
        rows = tokens.chunk(processes)[rank]
        adam.zero_grad(set_to_none=True)
        loss = loss_of(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        adam.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        return mean.item() / processes

    return train


def tensor(weights: Weights, *, compiled: bool) -> Train:
    """Each process has some heads, hidden features and tokens of the vocabulary, as Megatron-LM splits them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = whole(weights, compiled=compiled)
    for block in model.blocks:
        plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    ends = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh, ends)
    # One optimizer takes either tensors that are split or others.
    is_split = [isinstance(parameter, DTensor) for parameter in model.parameters()]
    adams = [adam_of(p for p, split in zip(model.parameters(), is_split, strict=True) if split == which)
             for which in (True, False)]  # fmt: skip

    def train(tokens: torch.Tensor) -> float:
        for adam in adams:
            adam.zero_grad(set_to_none=True)
        with loss_parallel():
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
        for adam in adams:
            adam.step()
        return loss.full_tensor().item()

    return train


AXES: dict[str, Callable[..., Train]] = {"data": data, "fsdp": fsdp, "tensor": tensor}


def split(name: str, weights: Weights, asked: argparse.Namespace) -> tuple[Train, bool]:
    """What this process does of a step."""
    return AXES[name](weights, compiled=asked.compile), asked.compile


if __name__ == "__main__":
    measure(split, options([*AXES], __doc__ or "").parse_args())
