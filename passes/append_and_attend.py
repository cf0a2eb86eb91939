"""The TensorRT plugin's form: an append and the attention that follows it as one functional op, caches returned.

before: K = kv_append(key_cache, k, at); V = kv_append(value_cache, v, at); block_attention(q, K, V, at)
after:  out, K, V = attend_appended(q, k, v, key_cache, value_cache, at)
"""

import operator

from torch import fx

from speccompile.passes.append_in_place import BLOCK_ATTENTION, attends_to_own_rows
from speccompile.passes.program import Program, is_call
from speccompile.plugins.block_attention.plugin_node import attend_appended


def append_and_attend(program: Program) -> int:
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    matches = 0
    for node in [n for n in program.graph.nodes if is_call(n, BLOCK_ATTENTION)]:
        if not attends_to_own_rows(node):
            continue
        q, key, value, at, *sinks = node.args
        if any(place.get(user, 0) < place[node] for cache in (key, value) for user in cache.users):
            continue  # something reads the new cache before
        with program.graph.inserting_before(node):
            fused = program.call(
                attend_appended._opoverload, q, key.args[1], value.args[1], key.args[0], value.args[0], at, *sinks,
                val=tuple(n.meta["val"] for n in (node, key, value)), **node.kwargs,
            )  # fmt: skip
            for index, old in enumerate((node, key, value)):
                old.replace_all_uses_with(_item(program, fused, index, old))
        matches += 1
    program.clean()
    return matches


def _item(program: Program, fused: fx.Node, index: int, like: fx.Node) -> fx.Node:
    return program.call(operator.getitem, fused, index, val=like.meta["val"])
