"""Remove what computes nothing: run-time assertions, casts to the same type, whole-axis slices, dropout.

before: y = aten.to(x, float32)   with x already float32
after:  x
"""

import torch

from speccompile.passes.program import Program, is_call

aten = torch.ops.aten
ASSERTIONS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range_for_size.default,
)
CASTS = (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default)
COPIES = (
    aten.alias.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.detach_.default,
    aten.lift_fresh_copy.default,
)
END = 2**62


def _computes_nothing(node: torch.fx.Node) -> bool:
    if is_call(node, *COPIES, aten.dropout.default):
        return True
    if is_call(node, *CASTS):
        return node.args[0].meta["val"].dtype == node.meta["val"].dtype
    if is_call(node, aten.slice.Tensor):
        start, end, step = (*node.args[2:], *(None, None, 1)[len(node.args) - 2 :])
        return start in (None, 0) and (end is None or (isinstance(end, int) and end > END)) and step == 1
    return False


def drop_noops(program: Program) -> int:
    matches = 0
    for node in list(program.graph.nodes):
        if is_call(node, *ASSERTIONS):
            program.graph.erase_node(node)
            matches += 1
        elif node.op == "call_function" and _computes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
            matches += 1
    program.clean()
    return matches
