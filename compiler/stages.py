"""Stages: models traced once, called as one node while the step around them is traced, then inlined.

Tracing a step that calls a large traced graph would trace that graph again. A `Stage` is instead a single
opaque call, `speccompile::stage(name, inputs) -> outputs`, in the step's own small trace; `inline` then puts
each stage's graph in its place. The same target trace so serves the fused step and the plain one.
"""

from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import fx, nn

OutputShapes = Callable[[list[torch.Tensor]], list[torch.Tensor]]

_stages: dict[str, "Stage"] = {}

torch.library.define("speccompile::stage", "(str name, Tensor[] inputs) -> Tensor[]")


@torch.library.impl("speccompile::stage", "CPU")
def _run(name: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone() if any(x is y for y in inputs) else x for x in _stages[name].graph_module(*inputs)]


@torch.library.register_fake("speccompile::stage")
def _fake(name: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return _stages[name].output_shapes(inputs)


def flat_copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The same graph over the same parameters, with flat inputs and outputs and no input checks."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return fx.GraphModule(graph_module, graph)


class Stage(nn.Module):
    """A traced graph with flat tensor inputs and outputs.

    `output_shapes` maps the inputs to empty tensors of the outputs' shapes and dtypes.
    """

    def __init__(self, name: str, graph_module: fx.GraphModule, output_shapes: OutputShapes):
        super().__init__()
        self.name = name
        self.output_shapes = output_shapes
        self._graph_module = [graph_module]  # a list, so that the step's trace does not see its parameters

    @property
    def graph_module(self) -> fx.GraphModule:
        return self._graph_module[0]

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return torch.ops.speccompile.stage(self.name, list(inputs))


@contextmanager
def callable_stages(*stages: Stage):
    """While active, `speccompile::stage` finds these stages by name."""
    _stages.update({stage.name: stage for stage in stages})
    try:
        yield
    finally:
        for stage in stages:
            _stages.pop(stage.name, None)


def inline(step: fx.GraphModule, stages: list[Stage]) -> None:
    """Replace every stage call of `step` by the stage's own graph; parameters become `<stage>.<name>` attributes."""
    by_name = {stage.name: stage for stage in stages}
    for call in [n for n in step.graph.nodes if n.target is torch.ops.speccompile.stage.default]:
        name, inputs = call.args
        graph_module = by_name[name].graph_module
        step.add_module(name, graph_module)
        values: dict[fx.Node, fx.Node] = dict(
            zip((n for n in graph_module.graph.nodes if n.op == "placeholder"), inputs, strict=True)
        )
        with step.graph.inserting_before(call):
            for node in graph_module.graph.nodes:
                if node.op in ("placeholder", "output"):
                    continue
                values[node] = copy = step.graph.node_copy(node, values.__getitem__)
                if node.op == "get_attr":
                    copy.target = f"{name}.{node.target}"
        outputs = next(n for n in graph_module.graph.nodes if n.op == "output").args[0]
        for item in list(call.users):
            item.replace_all_uses_with(values[outputs[item.args[1]]])
            step.graph.erase_node(item)
        step.graph.erase_node(call)
    step.graph.lint()
