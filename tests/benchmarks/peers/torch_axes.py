"""Data (DDP), FSDP2 and tensor (DTensor) parallel train steps of a GPT in PyTorch.

    python torch_axes.py gpt.npz                                   # one device, then each axis
    python torch_axes.py gpt.npz --names data --threads 1 --compile

A standalone script; its input file, model and output are those of `torch_gpt`.
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


def full_model(weights: Weights, *, compiled: bool) -> Stage:
    """All blocks with embedding and head."""
    return Stage(weights, 0, num_layers(weights), compiled=compiled)


def data(weights: Weights, *, compiled: bool) -> Train:
    """Replicated parameters; the batch sharded over processes."""
    return _data_parallel(DistributedDataParallel(full_model(weights, compiled=compiled)))


def fsdp(weights: Weights, *, compiled: bool) -> Train:
    """Parameters and batch sharded over processes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = full_model(weights, compiled=compiled)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return _data_parallel(fully_shard(model, mesh=mesh))


def _data_parallel(model: nn.Module) -> Train:
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
    """Heads, hidden features and vocabulary sharded over processes, as in Megatron-LM."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = full_model(weights, compiled=compiled)
    for block in model.blocks:
        plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    ends = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh, ends)
    # One optimizer takes either DTensors or plain tensors.
    adams = [
        adam_of(p for p in model.parameters() if isinstance(p, DTensor) == is_dtensor) for is_dtensor in (True, False)
    ]

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


def parallel(name: str, weights: Weights, arguments: argparse.Namespace) -> tuple[Train, bool]:
    """The train step of this process."""
    return AXES[name](weights, compiled=arguments.compile), arguments.compile


if __name__ == "__main__":
    measure(parallel, options([*AXES], __doc__ or "").parse_args())
