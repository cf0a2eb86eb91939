"""A program's graph as an exported program of PyTorch (`.pt2`), its weights in one safetensors file beside it.

The weights are inputs of the exported graph, after the step's own, so that several graphs share one file and a runtime
reads it straight to its device.
"""

import json
import operator
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import fx

CONTRACT = "contract.json"
EXAMPLE = {"batch": 3, "rows": 5}  # distinct primes, so that no two axes are taken for one


class Weights:
    """Every distinct tensor of the graphs, by name."""

    def __init__(self):
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> str:
        key = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
        if key not in self._names:
            while name in self.tensors:
                name += "_"
            self._names[key] = name
            self.tensors[name] = tensor
        return self._names[key]

    def save(self, path: Path) -> None:
        whole = {name: _own_storage(tensor.detach()) for name, tensor in self.tensors.items()}
        save_file(whole, path)
        path.chmod(0o644)  # safetensors leaves it to its owner alone


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    packed = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if packed else tensor.clone(memory_format=torch.contiguous_format)


def to_exported_program(
    graph_module: fx.GraphModule, inputs: list[str], dims: Mapping[str, list], weights: Weights
) -> tuple[torch.export.ExportedProgram, list[str]]:
    """Export the graph with its parameters as further inputs, added to `weights`. Returns their names too."""
    lifted, names = _lift(graph_module, weights)
    step_inputs = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    examples = [
        torch.zeros([EXAMPLE.get(d, d) for d in dims[name]], dtype=node.meta["val"].dtype)
        for name, node in zip(inputs, step_inputs, strict=True)
    ]
    dynamic = [
        {axis: torch.export.Dim.DYNAMIC for axis, d in enumerate(dims[name]) if d in EXAMPLE}
        for name in inputs
    ]
    arguments = (*examples, *(weights.tensors[name].detach() for name in names))
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        program = torch.export.export(
            lifted, arguments, dynamic_shapes=(*dynamic, *[None] * len(names)), strict=False
        )
    program._example_inputs = None  # they would be saved too, weights and all
    return program, names


def _lift(graph_module: fx.GraphModule, weights: Weights) -> tuple[fx.GraphModule, list[str]]:
    """The graph with a placeholder for every parameter, after its own placeholders, and the parameters' names."""
    graph, values, names = fx.Graph(), {}, {}
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            values[node] = graph.placeholder(node.name)
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            name = weights.add(node.target, operator.attrgetter(node.target)(graph_module))
            if name not in names:
                names[name] = graph.placeholder(f"weight_{len(names)}")
            values[node] = names[name]
    for node in graph_module.graph.nodes:
        if node.op not in ("placeholder", "get_attr"):
            values[node] = graph.node_copy(node, values.__getitem__)
    return fx.GraphModule({}, graph), list(names)


def save_program(
    program: torch.export.ExportedProgram,
    inputs: list[str],
    outputs: list[str],
    names: list[str],
    path: Path,
) -> None:
    contract = {"inputs": inputs, "outputs": outputs, "weights": names}
    torch.export.save(program, path, extra_files={CONTRACT: json.dumps(contract)})
