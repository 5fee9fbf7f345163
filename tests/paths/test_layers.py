"""Layers: which numbers in names count equal layers."""

from sharding.paths import Layers, merged_name


def layers(*names, odd=()):
    return Layers.of(dict.fromkeys(names, (8, 8)) | dict.fromkeys(odd, (8, 16)))


def test_only_indices_become_stars_without_names():
    plain = Layers()
    assert plain.pattern("params/12/w1 dim 0 <- tanh at gpt.py:12 (f)") == "params/*/w1 dim 0 <- tanh at gpt.py:12 (f)"
    assert plain.pattern("hidden#3 dim 1") == "hidden#* dim 1" and plain.pattern("a/0: x") == "a/0: x"
    assert plain.pattern("operand 1 of dot, hidden#12, resharded") == "operand 1 of dot, hidden#*, resharded"


def test_numbered_names_with_equal_structure_are_layers():
    for stem in ("layer_", "layers_", "Dense_", "h_", "block"):
        found = layers(f"p/{stem}0/mlp/w", f"p/{stem}1/mlp/w", f"p/{stem}10/mlp/w", "p/head/w")
        assert found.pattern(f"p/{stem}10/mlp/w") == f"p/{stem}*/mlp/w"
        text = f"operand 1 of p/{stem}1/mlp/w dim 0 at m.py:1"
        assert found.pattern(text) == f"operand 1 of p/{stem}*/mlp/w dim 0 at m.py:1"


def test_a_word_may_follow_the_number():
    found = layers("gpt/h0_up/w", "gpt/h1_up/w", odd=["gpt/h0_down/w", "gpt/h1_down/w"])
    assert found.stars == {f"h{n}_{word}": f"h*_{word}" for n in range(2) for word in ("up", "down")}
    assert merged_name(["gpt/h0_up/w", "gpt/h1_up/w"]) == "gpt/h*_up/w (x2)"
    assert not layers(*(f"layers/{n}/w" for n in range(12))).stars, "indices need none"
    assert not layers("p/conv1_3/w", "p/conv1_norm/w").stars and not layers("p/0_up/w", "p/1_up/w").stars


def test_siblings_of_other_shapes_or_paths_are_not():
    found = layers("p/Dense_0/w", "p/Dense_1/w", odd=["p/Dense_2/w"])
    assert found.stars == {"Dense_0": "Dense_*", "Dense_1": "Dense_*"}
    assert not layers("p/conv1/w", "p/conv2/w", "p/conv2/b").stars


def test_matrices_and_single_layers_are_not_layers():
    assert not layers("mlp/w1", "mlp/w2").stars
    assert not layers("p/layer_0/w", "p/other/w").stars


def test_two_kinds_of_layers_that_alternate_are_two_groups():
    found = layers("h_0/w", "h_2/w", odd=["h_1/w", "h_3/w"])
    rows = [(name, shape) for name, shape in (("h_0/w", 1), ("h_1/w", 2), ("h_2/w", 1), ("h_3/w", 2))]
    assert found.merged(rows) == [("h_*/w (x2)", [0, 2]), ("h_*/w (x2)", [1, 3])]


def test_layers_inside_layers():
    names = [f"s/stage_{i}/block_{j}/w" for i in range(2) for j in range(3)]
    assert layers(*names).merged([(n,) for n in names]) == [("s/stage_*/block_*/w (x6)", list(range(6)))]


def test_merged_names():
    assert merged_name(["a/b_0/w"]) == "a/b_0/w"
    assert merged_name(["a/b_0/w", "a/b_1/w"]) == "a/b_*/w (x2)"
    assert merged_name(["a/w", "a/b/w"]) == "a/w and others (x2)"
