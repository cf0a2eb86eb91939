"""Keep only the hidden states a draft reads, as one output.

before: target -> logits, hidden.0 … hidden.L, caches
after:  target -> logits, features [B, S, taps*H], caches      (no `features` where no layer is tapped)

Taps are indices into Transformers' `hidden_states`: 0 is the embedding's output, i that of decoder layer i - 1.
Order is the draft's own, since its projection expects the taps in that order.
"""

import torch

from speccompile.passes.program import Program


def tap_hidden_states(program: Program, indices: tuple[int, ...]) -> int:
    node = program.output_node
    by_name = dict(zip(program.outputs, node.args[0], strict=True))
    taps = [by_name[f"hidden.{i}"] for i in indices]
    kept = {name: value for name, value in by_name.items() if not name.startswith("hidden.")}
    outputs = {"logits": kept.pop("logits")}
    if taps:
        with program.graph.inserting_before(node):
            first = taps[0].meta["val"]
            val = first.new_empty(*first.shape[:-1], first.shape[-1] * len(taps))
            outputs["features"] = program.call(torch.ops.aten.cat.default, taps, -1, val=val)
    outputs |= kept
    node.args = (tuple(outputs.values()),)
    program.outputs = list(outputs)
    program.clean()
    return len(taps)
