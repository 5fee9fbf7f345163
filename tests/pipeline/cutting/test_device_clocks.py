"""Programs by device clocks: by hand, and the formulas that hold for all of them."""

import random

import pytest

from sharding.errors import ShardingError
from sharding.pipeline.cutting import DeviceOp, Value, interpret


def test_a_serial_program_takes_the_sum():
    numbers = random.Random("serial")
    seconds = [numbers.randint(1, 9) for _ in range(20)]
    assert interpret([DeviceOp((0,), s) for s in seconds], devices=1).latency == sum(seconds)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 5), (3, 4), (4, 2)])
def test_a_pipeline_of_equal_stages(stages, microbatches):
    ops = []
    for tick in range(stages + microbatches - 1):
        busy = [stage for stage in range(stages) if 0 <= tick - stage < microbatches]
        ops += [DeviceOp((stage,), 3.0) for stage in busy]
        ops += [DeviceOp((stage, stage + 1), 0.0) for stage in busy if stage + 1 < stages]
    assert interpret(ops, devices=stages).latency == (microbatches + stages - 1) * 3


def test_clocks_wait_for_each_other_and_never_go_back():
    numbers = random.Random("clocks")
    ops, before = [], [0.0] * 4
    for _ in range(50):
        own = tuple(numbers.sample(range(4), numbers.randint(1, 3)))
        ops.append(DeviceOp(own, numbers.randint(0, 5)))
        after = interpret(ops, devices=4).seconds
        for device in range(4):
            latest = max(before[d] for d in own) + ops[-1].seconds
            assert after[device] == (latest if device in own else before[device])
        before = after


def test_memory_by_hand():
    both = (0, 1)
    ops = [
        DeviceOp((0,), 1, ("batch",), (Value("a", 4, (0,)),)),  # batch 10 + a 4
        DeviceOp((0,), 1, ("a",), (Value("b", 9, (0,)),)),  # a 4 + b 9
        DeviceOp(both, 1, ("b",), (Value("c", 2, both),)),  # b 9 + c 2; and 2
        DeviceOp((1,), 1, ("c",), (Value("d", 1, (1,)),)),
    ]
    found = interpret(ops, devices=2, inputs=[Value("batch", 10, (0,))])
    assert found.peak_bytes == (14, 3)
    kept = interpret(ops, devices=2, inputs=[Value("batch", 10, (0,)), Value("weights", 100, both)])
    assert kept.peak_bytes == (114, 103)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (DeviceOp((2,), 1.0), "all below 2"),
        (DeviceOp((), 1.0), "at least one"),
        (DeviceOp((0,), 1.0, ("y",)), "reads 'y'"),
        (DeviceOp((0,), 1.0, (), (Value("x", 1, (0,)),)), "written twice"),
        (DeviceOp((0,), 1.0, (), (Value("z", 1, (5,)),)), "all below 2"),
    ],
)
def test_bad_programs(op, message):
    with pytest.raises(ShardingError, match=message):
        interpret([op], devices=2, inputs=[Value("x", 1, (0,))])
