"""Steps with sequences sharded over an axis equal those of one device."""

import jax
import numpy as np
import pytest
from support.short_runs import error_output, losses, run_two_steps, train

from sharding import ShardingError
from sharding.launch import main
from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.config.sequence_config import SequenceConfig, SequenceOptions
from sharding.launch.sharded_sequences import ShardedSequences
from sharding.launch.workloads import gpt_text
from sharding.models.gpt import Config

MODEL = {"vocab": 64, "context": 16, "layers": 2, "features": 32, "heads": 4, "kv_heads": 2, "mlp_features": 64}


@pytest.mark.parametrize("kind", ["ring", "ring_self", "ulysses"])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_the_order_of_tokens_by_length(kind, devices):
    """In zig-zag where each device of a ring then has two parts of equal length; a size that fits is suggested."""
    for length in range(1, 50):
        config = SequenceConfig(devices=devices, kind=kind)
        if length % devices:
            with pytest.raises(ShardingError, match=f"context length {length}") as caught:
                ShardedSequences.of(config, length)
            smaller = [n for n in range(2, devices) if length % n == 0]
            assert list(caught.value.fix) == [f"--mesh seq={n}" for n in smaller[-1:]]
            continue
        found, in_order = ShardedSequences.of(config, length), ShardedSequences.of(config, length, in_order=True)
        assert in_order.order == "plain" and in_order.positions is None
        assert (found.order == "zigzag") == (kind != "ulysses" and length % (2 * devices) == 0)
        if found.positions is not None:
            assert sorted(found.positions(length).tolist()) == [*range(length)]
            of_devices = np.split(np.asarray(found.positions(length)), devices)
            assert len({int(own.sum()) for own in of_devices}) == 1  # equally much to attend to


def step(sizes, kind=None, **changes):
    sequence = SequenceOptions(attention=kind).resolve(sizes)
    optimization = Optimization(sequence=sequence, warmup=0)
    return run_two_steps(gpt_text.FAMILY.build("gpt", Config(**MODEL | changes), optimization, steps=10, seed=0), sizes)


@pytest.fixture(scope="module")
def one_device():
    return step({"data": 1}, scan=True)


def check_figures(found, wanted):
    """Compare losses and gradient norms; those of the second step depend on the updated parameters.

    Parameters aren't compared: Adam's first step amplifies rounding where a gradient is nearly zero.
    """
    for ours, theirs in zip(found.metrics_per_step, wanted.metrics_per_step, strict=True):
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)


def test_a_ring_of_four(one_device):
    found = step({"seq": 4}, scan=True)
    check_figures(found, one_device)
    kinds = {(c.kind, tuple(map(str, c.axes))) for c in found.completion.communication()}
    assert kinds == {("collective-permute", ("seq",)), ("all-reduce", ("seq",))}  # gradients of replicated parameters


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "ring_self", "ulysses"])
@pytest.mark.parametrize("sizes", [{"data": 2, "seq": 4}, {"fsdp": 2, "tensor": 2, "seq": 2}, {"seq": 2}])
def test_steps_are_those_of_one_device(kind, sizes, one_device):
    check_figures(step(sizes, kind, scan=True), one_device)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"positions": "learned"}, {"remat": True, "scan": True}, {"context": 12}])
def test_other_models(changes):
    check_figures(step({"data": 2, "seq": 4}, **changes), step({"data": 1}, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "ring_self", "ulysses"])
def test_a_run_is_that_of_one_device(tmp_path, kind):
    found = train(tmp_path / "split", "--attention", kind, mesh="data=2,seq=4")
    wanted = train(tmp_path / "whole", mesh="data=1")
    np.testing.assert_allclose(losses(found), losses(wanted), rtol=1e-4)


@pytest.mark.slow
def test_a_sample_and_a_pipeline(tmp_path, capsys):
    out = str(tmp_path / "sample")
    main(["train", "--steps", "1", "--batch", "8", "--mesh", "seq=4,data=2", "--sample", "5", "--out", out])
    assert "def " in capsys.readouterr().out
    found = train(tmp_path / "pipe", "--mesh", "pipe=2,seq=2", mesh="pipe=2,seq=2")
    wanted = train(tmp_path / "whole", mesh="data=1")
    np.testing.assert_allclose(losses(found), losses(wanted), rtol=1e-4)


def test_invalid_options(capsys):
    assert "no seq axis" in error_output(capsys, "--mesh", "data=2", "--attention", "ring")
    assert "--attention ulysses" in error_output(capsys, "--mesh", "pipe=2,seq=2", "--attention", "ring")
    assert "128 / 3" in error_output(capsys, "--mesh", "seq=3")
    assert "gpt-tiny" in error_output(capsys, "--mesh", "seq=2", "--model", "bert-tiny")


def test_explain(capsys):
    main(["explain", "--mesh", "data=2,seq=4", "--attention", "ulysses", "--communication"])
    assert "all-to-all" in capsys.readouterr().out
    assert jax.device_count() == 8
