"""What a pass works on: a graph whose parameters are `get_attr` nodes, with named inputs and outputs."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx


@dataclass
class Program:
    """`inputs` and `outputs` name the graph's placeholders and returned values, in order.

    `aliases` maps an output to the input cache whose buffer it must be bound to (`target.0.key.out` to
    `target.0.key`), so that nothing of a cache is copied.
    """

    graph_module: fx.GraphModule
    inputs: list[str]
    outputs: list[str]
    aliases: dict[str, str] = field(default_factory=dict)
    merged: dict[tuple, torch.Tensor] = field(default_factory=dict)
    """Parameters that passes made out of others, by recipe. Programs over the same weights share it, and so the copies."""

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    @property
    def output_node(self) -> fx.Node:
        return next(n for n in reversed(self.graph.nodes) if n.op == "output")

    def returned(self, name: str) -> fx.Node:
        return self.output_node.args[0][self.outputs.index(name)]

    def placeholder(self, name: str) -> fx.Node:
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        return placeholders[self.inputs.index(name)]

    def add_output(self, name: str, value: fx.Node, alias: str) -> None:
        node = self.output_node
        node.args = ((*node.args[0], value),)
        self.outputs.append(name)
        self.aliases[name] = alias

    def tensor(self, node: fx.Node) -> torch.Tensor:
        """The parameter or constant behind a `get_attr` node."""
        return operator.attrgetter(node.target)(self.graph_module)

    def is_parameter(self, node: object) -> bool:
        return isinstance(node, fx.Node) and node.op == "get_attr"

    def add_parameter(self, name: str, tensor: torch.Tensor) -> str:
        """Register a tensor on the graph module under a fresh name; insert `graph.get_attr(name)` to use it."""
        while hasattr(self.graph_module, name):
            name += "_"
        self.graph_module.register_buffer(name, tensor)
        return name

    def call(self, target: Callable, *args: object, val: object, **kwargs: object) -> fx.Node:
        """A new call with its abstract value `val` (shape and dtype) recorded, at the current insertion point."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        return node

    def clean(self) -> None:
        """Drop dead nodes and check the graph. The module's Python code is not made anew: `run` does that."""
        self.graph.eliminate_dead_code()
        self.graph.lint()

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the graph as it stands, for tests and debugging."""
        self.graph_module.recompile()
        return self.graph_module(*inputs)


def is_call(node: object, *targets: Callable) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets
