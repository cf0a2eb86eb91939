"""One copy of every tensor: the draft's embedding and head are the target's, and tied weights stay tied.

before: target.lm_head.weight, propose.draft.head      (one storage, or two with equal bytes)
after:  target.lm_head.weight
"""

import torch

from speccompile.passes.program import Program


def _key(tensor: torch.Tensor) -> tuple:
    """Tensors that can be equal share this: shape, type and a few numbers from all over."""
    flat = tensor.detach().reshape(-1)
    probe = flat[:: max(1, flat.numel() // 8)][:8].tolist()
    return tuple(tensor.shape), tensor.dtype, str(probe)


def share_parameters(program: Program) -> int:
    kept: dict[tuple, list] = {}
    matches = 0
    for node in list(program.graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = program.tensor(node)
        if not isinstance(tensor, torch.Tensor):
            continue
        twins = kept.setdefault(_key(tensor), [])
        twin = next((n for n in twins if n.target == node.target or _same(program.tensor(n), tensor)), None)
        if twin is None:
            twins.append(node)
            continue
        matches += twin.target != node.target
        node.replace_all_uses_with(twin)
        program.graph.erase_node(node)
    _hoist(program, [n for twins in kept.values() for n in twins])
    program.clean()
    return matches


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() or torch.equal(a, b)


def _hoist(program: Program, nodes: list[torch.fx.Node]) -> None:
    """Parameters first, so that every user comes after its one copy."""
    first = next(iter(program.graph.nodes))
    for node in nodes:
        if node is not first:
            first.prepend(node)
