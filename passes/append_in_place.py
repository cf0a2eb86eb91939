"""The torch back end's form: caches written in place, an append and the attention that follows it as one op.

before: K = kv_append(key_cache, k, at); V = kv_append(value_cache, v, at); block_attention(q, K, V, at)
after:  append_and_attend(q, k, v, key_cache, value_cache, at)

Appends that no attention follows become `kv_append_`. Caches are no longer returned. A value of a cache stands for the
buffer from then on, so every reader of it must come before the next write, which is checked.
"""

from torch import fx

from speccompile.passes.program import Program, is_call
from speccompile.plugins.block_attention import block_attention
from speccompile.plugins.block_attention.append_and_attend import append_and_attend
from speccompile.plugins.kv_append import kv_append, kv_append_

BLOCK_ATTENTION = block_attention._opoverload
KV_APPEND = kv_append._opoverload


def append_in_place(program: Program) -> int:
    _check_order(program)
    _drop_cache_outputs(program)
    attentions = [n for n in program.graph.nodes if is_call(n, BLOCK_ATTENTION) and attends_to_own_rows(n)]
    for node in attentions:
        if not attends_to_own_rows(node):  # another attention to the same rows came first, and writes them
            continue
        q, key, value, at, *sinks = node.args
        with program.graph.inserting_before(node):
            fused = program.call(
                append_and_attend._opoverload, q, key.args[1], value.args[1], key.args[0], value.args[0], at, *sinks,
                val=node.meta["val"], **node.kwargs,
            )  # fmt: skip
        node.replace_all_uses_with(fused)
        program.graph.erase_node(node)
        for append in (key, value):
            append.replace_all_uses_with(append.args[0])
            program.graph.erase_node(append)
    for node in [n for n in program.graph.nodes if is_call(n, KV_APPEND)]:
        with program.graph.inserting_before(node):
            program.call(kv_append_._opoverload, *node.args, val=None)
        node.replace_all_uses_with(node.args[0])
        program.graph.erase_node(node)
    program.clean()
    return len(attentions)


def attends_to_own_rows(node: fx.Node) -> bool:
    """Does the attention follow the append of just its own rows?"""
    q, key, value, at = node.args[:4]
    if not (is_call(key, KV_APPEND) and is_call(value, KV_APPEND) and key.args[2] is value.args[2] is at):
        return False
    return str(key.args[1].meta["val"].shape[2]) == str(q.meta["val"].shape[2])


def _check_order(program: Program) -> None:
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    for name in program.aliases:
        value = program.returned(name)
        while is_call(value, KV_APPEND):
            before = value.args[0]
            late = [
                u for u in before.users if u is not value and place[u] > place[value] and u.op != "output"
            ]
            if late:
                raise RuntimeError(f"{late[0]} reads {before} after {value} wrote over it.")
            value = before


def _drop_cache_outputs(program: Program) -> None:
    node = program.output_node
    kept = [i for i, name in enumerate(program.outputs) if name not in program.aliases]
    node.args = (tuple(node.args[0][i] for i in kept),)
    program.outputs = [program.outputs[i] for i in kept]
    program.aliases = {}
