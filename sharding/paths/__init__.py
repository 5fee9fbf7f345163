"""Array names: pytree paths such as `state/params/blocks/0/mlp/w1`, lookup and globs over them, and equal layers.

In: pytrees, or names of values. Out: paths, the names that a path, an end of one or a glob matches, and their layers.

Example:
    >>> from sharding import paths
    >>> names = paths.of_tree({"layer_0": {"w": 1}, "layer_1": {"w": 2}}, "params")
    >>> names, paths.Glob("*/w").among(names)
    (['params/layer_0/w', 'params/layer_1/w'], ['params/layer_0/w', 'params/layer_1/w'])
    >>> paths.Layers.of(dict.fromkeys(names, (8, 8))).pattern(names[0])
    'params/layer_*/w'
"""

from .globs import Glob, unmatched
from .layers import Layers, merged_name
from .lookup import ambiguous, find, find_all
from .tree_paths import of_tree, text

__all__ = ["Glob", "Layers", "ambiguous", "find", "find_all", "merged_name", "of_tree", "text", "unmatched"]
