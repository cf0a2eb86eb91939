"""Write out the type promotion that ATen does silently, since ONNX operators want operands of one type.

before: aten.mul(x float32, n int64)
after:  aten.mul(x, aten.to(n, float32))
"""

import torch

from speccompile.passes.program import Program, is_call

aten = torch.ops.aten
BINARY = tuple(
    overload
    for name in ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge")
    for overload in (getattr(getattr(aten, name), "Tensor", None), getattr(getattr(aten, name), "Tensor_Tensor", None),
                     getattr(getattr(aten, name), "default", None))
    if overload is not None
)  # fmt: skip


def promote_types(program: Program) -> int:
    matches = 0
    for node in list(program.graph.nodes):
        if not is_call(node, *BINARY) or len(node.args) < 2:
            continue
        operands = node.args[:2]
        if not all(
            isinstance(x, torch.fx.Node) and isinstance(x.meta.get("val"), torch.Tensor) for x in operands
        ):
            continue
        wanted = torch.result_type(
            *(
                torch.empty(x.meta["val"].dim() and (1,), dtype=x.meta["val"].dtype)
                if x.meta["val"].dim()
                else torch.zeros((), dtype=x.meta["val"].dtype)
                for x in operands
            )
        )
        for position, operand in enumerate(operands):
            if operand.meta["val"].dtype != wanted:
                with program.graph.inserting_before(node):
                    cast = program.call(aten.to.dtype, operand, wanted, val=operand.meta["val"].to(wanted))
                node.update_arg(position, cast)
                matches += 1
    program.clean()
    return matches
