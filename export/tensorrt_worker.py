"""Builds one TensorRT engine from an ONNX file, in a process of its own: a miss inside the library ends the process.

    python -m speccompile.export.tensorrt_worker SPEC.json

Prints one JSON object a line: {"phase", "step", "of"} as it goes, then {"report"} or {"error"}.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speccompile.plugins.block_attention.tensorrt_plugin import register


def main(path: str) -> None:
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints is no answer

    def say(**message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    spec = json.loads(Path(path).read_text())
    try:
        say(report=_build(spec, say))
    except _Refused as error:
        say(error=str(error))


class _Refused(Exception):
    """What the user is to read."""


def _build(spec: dict[str, Any], say: Callable[..., None]) -> dict[str, Any]:
    trt = importlib.import_module(spec["library"])
    logger = _logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    if spec["plugins"]:
        register(trt)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(spec["onnx"]):
        raise _Refused(_parse_error(parser))
    report = {"layers": _layers(trt, network), "version": trt.__version__}
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, spec["plugins"])
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for shapes in spec["profiles"]:
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            name = network.get_input(index).name
            profile.set_shape(name, *(shapes[name][bound] for bound in ("min", "opt", "max")))
        config.add_optimization_profile(profile)
    _choose_architectures(trt, config, spec["sm"])
    config.progress_monitor = _monitor(trt, say)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise _Refused(logger.last_error or "TensorRT gave no reason")
    Path(spec["engine"]).write_bytes(serialized)
    return report


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):
        def __init__(self):
            super().__init__()
            self.last_error = ""

        def log(self, severity, message):
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.last_error = message

    return Logger()


def _monitor(trt: Any, say: Callable[..., None]) -> Any:
    class Monitor(trt.IProgressMonitor):
        def __init__(self):
            super().__init__()
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name, parent_phase, num_steps):
            self.steps[phase_name] = num_steps
            say(phase=phase_name, step=0, of=num_steps)

        def step_complete(self, phase_name, step):
            say(phase=phase_name, step=step + 1, of=self.steps[phase_name])
            return True

        def phase_finish(self, phase_name):
            pass

    return Monitor()


def _parse_error(parser: Any) -> str:
    error = parser.get_error(0)
    where = f"node {error.node_name()!r} ({error.node_operator()})" if error.node_name() else "the graph"
    return f"TensorRT's ONNX parser refused {where}: {error.desc()}"


def _layers(trt: Any, network: Any) -> list[dict[str, Any]]:
    layers = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        entry = {"name": layer.name, "type": layer.type.name}
        if layer.type == trt.LayerType.ATTENTION_OUTPUT:
            layer.__class__ = trt.IAttentionOutputLayer
            attention = layer.attention
            entry |= {
                "mask": attention.mask is not None,
                "lengths": attention.key_value_lengths is not None,
                "causal": attention.causal_kind.name,
                "decomposable": attention.decomposable,
            }
        layers.append(entry)
    return layers


def _choose_architectures(trt: Any, config: Any, architectures: list[int]) -> None:
    if not architectures:
        return
    config.num_compute_capabilities = len(architectures)
    for index, sm in enumerate(architectures):
        config.set_compute_capability(trt.ComputeCapability.__members__[f"SM{sm}"], index)


def _end_with_parent() -> None:
    """Linux: a killed build takes its worker along."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main(sys.argv[1])
