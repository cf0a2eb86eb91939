"""A Triton Inference Server model repository out of an ONNX engine: the caches are a sequence's implicit state.

    OUT/NAME/config.pbtxt          inputs and outputs of the step, states, batching
    OUT/NAME/1/model.onnx          the fused step           OUT/NAME/1/rank0.weights

A client sends one request a step with its sequence's id, as `samples/cpp/decode.cpp` calls the step: prompt chunks, then the
block of the answer before; `sequence_start` with the first, `sequence_end` with the last. Requests of different sequences
and one shape are batched; Triton gathers their states, which copies them.
"""

import shutil
from pathlib import Path
from typing import Any

from speccompile.export.directory import STEP, WEIGHTS, EngineDirectory, atomic_directory
from speccompile.export.errors import UserError

TYPES = {"int64": "TYPE_INT64", "float32": "TYPE_FP32", "float16": "TYPE_FP16"}
IDLE_MICROSECONDS = 60_000_000


def export_triton(engine: EngineDirectory, out: Path, name: str, replace: bool = False) -> Path:
    """Write the repository; returns the model's directory in it. Raises UserError."""
    if engine.settings["step_file"] != STEP:
        raise UserError(
            f"{engine.path} is an engine for {engine.settings['backend']}; Triton's ONNX Runtime back end takes those built with --backend onnxruntime."
        )
    with atomic_directory(out / name, replace, marker="config.pbtxt") as building:
        version = building / "1"
        version.mkdir()
        shutil.copyfile(engine.path / STEP, version / "model.onnx")
        shutil.copyfile(engine.path / WEIGHTS, version / WEIGHTS)
        (building / "config.pbtxt").write_text(config_text(engine.settings, name), encoding="utf-8")
    return out / name


def config_text(settings: dict[str, Any], name: str) -> str:
    """config.pbtxt, in protobuf's text form."""
    caches, batch = settings["caches"], settings["max_batch_size"]
    tensors = {tensor["name"]: tensor for tensor in settings["tensors"]}
    lines = [
        f'name: "{name}"',
        'backend: "onnxruntime"',
        f"max_batch_size: {batch}",
        "sequence_batching {",
        f"  max_sequence_idle_microseconds: {IDLE_MICROSECONDS}",
        f"  oldest {{ max_candidate_sequences: {batch} max_queue_delay_microseconds: 100 }}",
    ]
    for output, cache in settings["aliases"][STEP].items():
        if output not in tensors or not output.endswith(".out"):
            continue  # a value of the cache on its way
        dims, kind = _dims(tensors[cache]["shape"]), TYPES[tensors[cache]["dtype"]]
        lines += [
            "  state {",
            f'    input_name: "{cache}" output_name: "{output}" data_type: {kind} dims: {dims}',
            f'    initial_state {{ name: "{cache}.empty" data_type: {kind} dims: {dims} zero_data: true }}',
            "  }",
        ]
    lines.append("}")
    for tensor in tensors.values():
        if tensor["name"] in caches or "bound_to" in tensor:
            continue
        dims = _dims(tensor["shape"])
        shape = f"dims: {dims}" if dims != "[ ]" else "dims: [ 1 ] reshape { shape: [ ] }"
        lines.append(
            f'{tensor["role"]} {{ name: "{tensor["name"]}" data_type: {TYPES[tensor["dtype"]]} {shape} }}'
        )
    return "\n".join(lines) + "\n"


def _dims(shape: list) -> str:
    """Without the batch, which Triton adds; a named dimension is of any size."""
    return (
        "[ " + ", ".join(str(dim) if isinstance(dim, int) else "-1" for dim in shape[1:]) + " ]"
        if shape[1:]
        else "[ ]"
    )
