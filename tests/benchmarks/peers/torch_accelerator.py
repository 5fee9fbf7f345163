"""The train step of `torch_gpt` on one accelerator, with activations in bfloat16.

Imports PyTorch and nothing of ours. The file is that of `gpt_workload.export`. The model, its loss and the gradients go
through one `torch.compile`; attention is PyTorch's fused one, the optimizer its fused Adam. One line is printed, as
JSON: `seconds` of a step, by runs of `--run` steps without a pause; `losses` of all steps, before each update;
`peak_bytes` of the device's memory; `device`, `torch`.
"""

import argparse
import json
import time

import torch
from torch_gpt import Stage, adam_of, loss_of, num_layers, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", help="weights and tokens")
    parser.add_argument("--run", type=int, default=10, help="steps that are timed together")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    found = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    weights = read(found.file)
    model = Stage(weights, 0, num_layers(weights), compiled=False).to(found.device)
    adam = adam_of(model.parameters())
    is_gpu = found.device == "cuda"

    @torch.compile
    def loss_in_bfloat16(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(found.device, torch.bfloat16):
            return loss_of(model(tokens[:, :-1]), tokens[:, 1:])

    def step(tokens: torch.Tensor) -> torch.Tensor:
        adam.zero_grad(set_to_none=True)
        loss = loss_in_bfloat16(tokens)
        loss.backward()
        adam.step()
        return loss.detach()

    def steps(batches: torch.Tensor) -> float:
        begun = time.perf_counter()
        losses.extend(step(batch) for batch in batches)
        if is_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / len(batches)

    losses: list[torch.Tensor] = []
    tokens = weights["tokens"].to(found.device)
    steps(tokens[: found.warmup])
    seconds = [steps(batches) for batches in tokens[found.warmup :].split(found.run)]
    line = {
        "seconds": seconds,
        "losses": [float(loss) for loss in losses],
        "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else None,
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "torch": torch.__version__,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
