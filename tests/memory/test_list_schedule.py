"""The greedy schedule against its definition."""

import random

import pytest

from sharding.memory.fusion import Kernel
from sharding.memory.instruction import Instruction
from sharding.memory.list_schedule import list_order


def random_kernels(generator: random.Random) -> list[Kernel]:
    kernels: list[Kernel] = []
    for _ in range(generator.randrange(2, 16)):
        operands = generator.sample(kernels, min(len(kernels), generator.randrange(3)))
        size = generator.choice([1, 2, 5, 9])
        role = "argument" if not operands and generator.random() < 0.3 else "unfusible"
        made = Instruction("x", role, [k.root for k in operands], (size,), 4 * size)
        kernels.append(Kernel(made, [made], made.operands))
    return kernels


@pytest.mark.parametrize("seed", range(40))
def test_what_frees_most_runs_next(seed):
    kernels = random_kernels(random.Random(seed))
    place = {kernel.root: k for k, kernel in enumerate(kernels)}
    sources = [[place[x] for x in kernel.operands] for kernel in kernels]
    results = [kernel.root for kernel in random.Random(seed).sample(kernels, 2)]
    order = list_order([[kernel] for kernel in kernels], sources, results)
    assert sorted(order) == list(range(len(kernels)))
    done: set[int] = set()

    def freed(k: int) -> float:
        if kernels[k].root.num_elements == 1:
            return float("inf")
        left = [x for x in dict.fromkeys(kernels[k].operands) if x not in results and x.role != "argument"]
        last = [x for x in left if all(j in done or j == k for j, own in enumerate(sources) if place[x] in own)]
        own = 0 if kernels[k].root.role == "argument" else kernels[k].root.num_bytes
        return sum(x.num_bytes for x in last) - own

    for k in order:
        ready = [j for j in range(len(kernels)) if j not in done and done.issuperset(sources[j])]
        assert k in ready and freed(k) == max(map(freed, ready))
        done.add(k)
