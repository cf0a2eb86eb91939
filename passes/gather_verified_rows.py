"""Pick the verified rows before the output head instead of after it: prefill then pays K rows of logits, not S.

before: gather(cap · tanh(linear(hidden [B, S, H], W) / cap), rows)
after:  cap · tanh(linear(gather(hidden, rows) [B, K, H], W) / cap)

Any chain of operations that treat rows alone (the head, scaling, soft-capping, casts) commutes with the gather.
"""

import torch

from speccompile.passes.program import Program, is_call

aten = torch.ops.aten
ROWWISE = (
    aten.linear.default, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.tanh.default,
    aten.add.Tensor, aten.neg.default, aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default,
)  # fmt: skip


def _commutes(node: torch.fx.Node) -> bool:
    """A row-wise call with one user whose other operands do not vary by row (parameters and numbers)."""
    if not is_call(node, *ROWWISE) or len(node.users) != 1:
        return False
    others = [x for x in node.all_input_nodes if x is not node.args[0]]
    return all(x.op == "get_attr" for x in others)


def gather_verified_rows(program: Program) -> int:
    matches = 0
    for gather in list(program.graph.nodes):
        if not is_call(gather, aten.gather.default) or not is_call(gather.args[2], aten.expand.default):
            continue
        chain, source = [], gather.args[0]
        while _commutes(source):
            chain.append(source)
            source = source.args[0]
        if not any(is_call(node, aten.linear.default) for node in chain):
            continue
        rows = gather.args[2].args[0]  # [B, K, 1]
        leading = gather.meta["val"].shape[:2]
        with program.graph.inserting_before(gather):
            width = source.meta["val"].shape[2]
            index = program.call(
                aten.expand.default,
                rows,
                [-1, -1, width],
                val=gather.meta["val"].new_empty(*leading, width, dtype=torch.int64),
            )
            picked = program.call(
                aten.gather.default,
                source,
                1,
                index,
                val=gather.meta["val"].new_empty(*leading, width, dtype=source.meta["val"].dtype),
            )
            for node in reversed(chain):  # replay from the source outwards, now on K rows
                copy = program.graph.node_copy(
                    node, lambda n, was=node.args[0], now=picked: now if n is was else n
                )
                copy.meta["val"] = gather.meta["val"].new_empty(
                    *leading, node.meta["val"].shape[2], dtype=node.meta["val"].dtype
                )
                picked = copy
        gather.replace_all_uses_with(picked)
        matches += 1
    program.clean()
    return matches
