"""Lock files: byte-identical for the same program, and a diff for another."""

import jax
import pytest

import sharding
from sharding import P, ShardingError


def step(w, x):
    return sharding.annotate(x @ w, P("data"), name="hidden").sum()


SPECS = (P(), P("data"))


def complete(in_shardings=SPECS, sizes=None):
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((16, 8), (32, 16))]
    with sharding.mesh(sizes or {"data": 2, "tensor": 4}):
        return sharding.jit(step, in_shardings=in_shardings).complete(*shapes)


def test_an_unchanged_program_has_a_byte_identical_lock(tmp_path):
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path in paths:
        complete().lock(path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    sharding.check_lock(complete(), paths[0])


def test_a_changed_annotation_fails_and_names_the_value(tmp_path):
    complete().lock(tmp_path / "a.json")
    with pytest.raises(ShardingError, match=r"w 16x8: \[-, -\] -> \[-, tensor\]"):
        sharding.check_lock(complete(in_shardings=(P(None, "tensor"), P("data"))), tmp_path / "a.json")


def test_a_changed_mesh(tmp_path):
    complete().lock(tmp_path / "a.json")
    with pytest.raises(ShardingError, match="mesh: data=2, tensor=4 -> data=4, tensor=2"):
        sharding.check_lock(complete(sizes={"data": 4, "tensor": 2}), tmp_path / "a.json")


def test_two_completions():
    lines = complete().diff(complete(in_shardings=(P(None, "tensor"), P("data"))))
    assert any(line.startswith("w 16x8") for line in lines)
    assert complete().diff(complete()) == ()


@pytest.mark.parametrize("text", [None, "", "{}", "[1]", '{"version": 9}', "\x00"])
def test_no_lock_file(text, tmp_path):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ShardingError, match=r"required: a file written by completion\.lock"):
        sharding.check_lock(complete(), path)


def test_predicted_compared_with_compiled():
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((16, 8), (32, 16))]
    with sharding.mesh(data=2, tensor=4):
        jitted = sharding.jit(step, in_shardings=(P("tensor"), P("data")))
        found = jitted.complete(*shapes).verify(jitted.lower(*shapes).compile())
    assert found.agrees and found.predicted
    assert "all-reduce" in str(found) and "peak memory" in str(found)
