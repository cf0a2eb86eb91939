"""One node for a root-mean-square norm in float32.

before: w * (x * rsqrt(mean(x², -1, keepdim) + eps))
after:  rms_norm(x, [H], w, eps)

`w` is a vector [H], a parameter or something made of one (Gemma's 1 + w).
"""

import torch

from speccompile.passes.program import Program, is_call

aten = torch.ops.aten


def fuse_rms_norm(program: Program) -> int:
    matches = 0
    for node in list(program.graph.nodes):
        if not is_call(node, aten.mul.Tensor) or len(node.args) != 2:
            continue
        for weight, normed in (node.args, node.args[::-1]):
            found = _normalised(normed)
            if found is None or not _is_vector(weight, found[0]):
                continue
            x, eps = found
            with program.graph.inserting_before(node):
                norm = program.call(
                    aten.rms_norm.default, x, [x.meta["val"].shape[-1]], weight, eps, val=node.meta["val"]
                )
            node.replace_all_uses_with(norm)
            matches += 1
            break
    program.clean()
    return matches


def _normalised(node: object) -> tuple[torch.fx.Node, float] | None:
    """x and eps if `node` is x * rsqrt(mean(x², -1, keepdim) + eps) in float32."""
    if not is_call(node, aten.mul.Tensor) or not is_call(node.args[1], aten.rsqrt.default):
        return None
    x, total = node.args[0], node.args[1].args[0]
    if not is_call(total, aten.add.Tensor) or not isinstance(total.args[1], float):
        return None
    mean, eps = total.args
    if not is_call(mean, aten.mean.dim) or list(mean.args[1]) != [-1] or mean.args[2:3] != (True,):
        return None
    square = mean.args[0]
    is_square = is_call(square, aten.pow.Tensor_Scalar) and square.args[0] is x and square.args[1] == 2
    return (x, eps) if is_square and x.meta["val"].dtype == torch.float32 else None


def _is_vector(weight: object, x: torch.fx.Node) -> bool:
    val = weight.meta.get("val") if isinstance(weight, torch.fx.Node) else None
    return (
        isinstance(val, torch.Tensor)
        and val.dtype == torch.float32
        and tuple(val.shape) == (x.meta["val"].shape[-1],)
    )
