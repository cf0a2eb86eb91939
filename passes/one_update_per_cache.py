"""A draft cache's two updates of a step, context rows and then the block's, as one.

before: kv_append(kv_append(cache, context, lengths), block, new_lengths)
after:  kv_append_pair(cache, context, lengths, block, new_lengths)

TensorRT's cache update takes a network input and must be a network output, so there can be only one. Where the
first update is read by anything else (a chain draft attends to it), nothing is done.
"""

from speccompile.passes.program import Program, is_call
from speccompile.plugins.kv_append import kv_append, kv_append_pair

KV_APPEND = kv_append._opoverload


def one_update_per_cache(program: Program) -> int:
    matches = 0
    for node in [n for n in program.graph.nodes if is_call(n, KV_APPEND)]:
        first = node.args[0]
        if not (
            is_call(first, KV_APPEND) and first.args[0].op == "placeholder" and set(first.users) == {node}
        ):
            continue
        with program.graph.inserting_before(node):
            merged = program.call(
                kv_append_pair._opoverload, *first.args, *node.args[1:], val=node.meta["val"]
            )
        node.replace_all_uses_with(merged)
        matches += 1
    program.clean()
    return matches
