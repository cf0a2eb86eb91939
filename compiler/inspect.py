"""`speccompile inspect`: an engine directory described for people and scripts."""

from collections import Counter
from pathlib import Path
from typing import Any

import onnx

from speccompile.export import memory
from speccompile.export.directory import PLAIN, STEP, EngineDirectory
from speccompile.export.errors import UserError
from speccompile.export.graph_view import graph_html, graph_text

BATCHES = (1, 8, 32)


def describe(engine: EngineDirectory) -> dict[str, Any]:
    """Everything `inspect` shows, as one JSON object. Sizes in bytes."""
    settings, report = engine.settings, engine.report
    model = _load(engine, STEP)
    weights = engine.manifest["files"]["rank0.weights"]["bytes"]
    return {
        "path": str(engine.path),
        "architecture": engine.config["pretrained_config"]["architecture"],
        **{
            key: settings[key]
            for key in (
                "backend",
                "dtype",
                "block_width",
                "max_seq_len",
                "max_batch_size",
                "contract_version",
            )
        },
        "target": settings["target"],
        "draft": settings["draft"],
        "inputs": [_tensor(value) for value in model.graph.input],
        "outputs": [
            _tensor(value) | _alias(value.name, settings["aliases"][STEP]) for value in model.graph.output
        ],
        "operations": {
            name: dict(Counter(_operation(node) for node in _load(engine, name).graph.node).most_common())
            for name in (STEP, PLAIN)
        },
        "passes": report["passes"],
        "stages": report["stages"],
        "bytes": report["bytes"],
        "memory": [
            {
                "batch": batch,
                "weights": weights,
                "target_caches": memory.cache_bytes(settings, "target", batch),
                "draft_caches": memory.cache_bytes(settings, "draft", batch),
            }
            for batch in BATCHES
        ],
        "versions": engine.manifest["versions"],
    }


def write_graph(engine: EngineDirectory, file: Path) -> None:
    """Write the fused step's graph as .html, .txt or .onnx. Raises UserError for another ending."""
    model = _load(engine, STEP)
    try:
        if file.suffix == ".html":
            file.write_text(graph_html(model, str(engine.path)), encoding="utf-8")
        elif file.suffix == ".txt":
            file.write_text(graph_text(model), encoding="utf-8")
        elif file.suffix == ".onnx":
            file.write_bytes(model.SerializeToString())
        else:
            raise UserError(
                f"--graph {file} ends in {file.suffix or 'nothing'}; .html, .txt or .onnx was expected."
            )
    except OSError as error:
        raise UserError(f"{file} could not be written ({error.strerror}).") from None


def _load(engine: EngineDirectory, name: str) -> onnx.ModelProto:
    return onnx.load(engine.path / name, load_external_data=False)


def _operation(node: onnx.NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _tensor(value: onnx.ValueInfoProto) -> dict[str, Any]:
    tensor = value.type.tensor_type
    shape = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
    return {
        "name": value.name,
        "dtype": onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name,
        "shape": shape,
    }


def _alias(name: str, aliases: dict[str, str]) -> dict[str, str]:
    return {"bound_to": aliases[name]} if name in aliases else {}
