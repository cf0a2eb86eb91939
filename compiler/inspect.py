"""`speccompile inspect`: an engine directory described for people and scripts."""

from collections import Counter
from pathlib import Path
from typing import Any

import onnx

from speccompile.export import memory
from speccompile.export.directory import STEP, TORCH_WEIGHTS, WEIGHTS, EngineDirectory
from speccompile.export.errors import UserError
from speccompile.export.graph_view import graph_html, graph_text
from speccompile.export.tensorrt import describe as describe_engine

BATCHES = (1, 8, 32)


def describe(engine: EngineDirectory) -> dict[str, Any]:
    """Everything `inspect` shows, as one JSON object. Sizes in bytes."""
    settings, report = engine.settings, engine.report
    files = engine.manifest["files"]
    weights = files[next(n for n in (WEIGHTS, TORCH_WEIGHTS, settings["step_file"]) if n in files)]["bytes"]
    tensorrt = report.get("tensorrt")
    described = {} if tensorrt is None else tensorrt | describe_engine(engine.path / settings["step_file"])
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
        **{
            f"{role}s": [tensor for tensor in settings["tensors"] if tensor["role"] == role]
            for role in ("input", "output")
        },
        "operations": report.get("operations")
        or {
            name: dict(Counter(_operation(node) for node in _load(engine, name).graph.node).most_common())
            for name in settings["aliases"]
            if tensorrt is None
        },
        "tensorrt": described,
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
    if engine.settings["step_file"] != STEP:
        raise UserError(
            f"{engine.path} holds {engine.settings['step_file']}, and --graph shows ONNX graphs only; `inspect` alone lists what is in it."
        )
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
