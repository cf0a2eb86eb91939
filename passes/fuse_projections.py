"""One matrix product for projections of the same rows: q/k/v, gate/up, and the draft's context k/v of all layers.

before: linear(x, Wq, bq), linear(x, Wk, bk), linear(x, Wv, bv)
after:  y = linear(x, [Wq; Wk; Wv], [bq; bk; bv]); y[..., :q], y[..., q:q+k], y[..., q+k:]
"""

import torch

from speccompile.passes.program import Program, is_call

aten = torch.ops.aten


def fuse_projections(program: Program) -> int:
    groups: dict[tuple, list[torch.fx.Node]] = {}
    embeddings = {n.args[0] for n in program.graph.nodes if is_call(n, aten.embedding.default)}
    for node in program.graph.nodes:
        if not is_call(node, aten.linear.default):
            continue
        x, weight, *bias = node.args
        # A tied head stays alone: merging it would copy the embedding table.
        if not all(program.is_parameter(p) for p in (weight, *bias) if p is not None) or weight in embeddings:
            continue
        groups.setdefault((x, bool(bias and bias[0] is not None), program.tensor(weight).dtype), []).append(
            node
        )
    matches = 0
    for (x, has_bias, _), nodes in groups.items():
        if len(nodes) > 1:
            _fuse(program, x, nodes, has_bias)
            matches += 1
    program.clean()
    return matches


def _fuse(program: Program, x: torch.fx.Node, nodes: list[torch.fx.Node], has_bias: bool) -> None:
    name = nodes[0].args[1].target.replace(".", "_").removesuffix("_weight")
    first = nodes[0].meta["val"]
    sizes = [program.tensor(n.args[1]).shape[0] for n in nodes]
    arguments = []
    for position, kind in ((1, "weight"), (2, "bias"))[: 2 if has_bias else 1]:
        parts = [program.tensor(n.args[position]) for n in nodes]
        recipe = ("cat", *(part.data_ptr() for part in parts))
        if recipe not in program.merged:
            program.merged[recipe] = torch.cat(parts)
        merged = program.merged[recipe]
        with program.graph.inserting_before(next(iter(program.graph.nodes))):
            parameter = program.graph.get_attr(program.add_parameter(f"{name}_fused_{kind}", merged))
        parameter.meta["val"] = merged
        arguments.append(parameter)
    with program.graph.inserting_after(x):
        y = program.call(
            aten.linear.default, x, *arguments, val=first.new_empty(*first.shape[:-1], sum(sizes))
        )
    start, after = 0, y
    for node, size in zip(nodes, sizes, strict=True):
        with program.graph.inserting_after(after):
            after = program.call(aten.slice.Tensor, y, -1, start, start + size, val=node.meta["val"])
        node.replace_all_uses_with(after)
        program.graph.erase_node(node)
        start += size
