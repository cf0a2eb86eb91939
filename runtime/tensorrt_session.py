"""One step of an engine on TensorRT-RTX or TensorRT: caches in device memory, written in place, one CUDA graph for each shape.

PyTorch holds the device memory. Not executed where this was written: it had no GPU.
"""

import importlib

import numpy as np

from speccompile.export.directory import EngineDirectory
from speccompile.export.errors import UserError
from speccompile.plugins.block_attention.tensorrt_plugin import register
from speccompile.runtime.session import Sampling, StepOutput, check_batch, output_shapes, small_inputs


class TensorrtSession:
    """The fused step of a `tensorrt-rtx` or `tensorrt` engine, for a fixed number of sequences."""

    def __init__(self, engine: EngineDirectory, batch: int, plain: bool = False, threads: int = 0):
        torch, trt = _libraries(engine)
        settings = engine.settings
        check_batch(batch, settings)
        self.torch, self.batch, self.plain = torch, batch, False
        self.width, self.capacity, self.max_seq_len = (
            settings[k] for k in ("block_width", "capacity", "max_seq_len")
        )
        self.prefill_chunk = settings["prefill_chunk"]
        if settings["plugins"]:
            self.creators = register(trt)
        self.captures = not hasattr(trt, "CudaGraphStrategy")
        """TensorRT-RTX captures CUDA graphs itself; for TensorRT it is done here."""
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.engine = _deserialize(trt, engine.path / settings["step_file"])
        self.contexts = [self._context(trt, profile) for profile in range(2)]
        dtype = getattr(torch, settings["dtype"])
        self.caches = {
            name: torch.zeros(batch, shape["heads"], self.capacity, shape["size"], dtype=dtype, device="cuda")
            for name, shape in settings["caches"].items()
        }
        tensors = {tensor["name"]: tensor for tensor in settings["tensors"]}
        self.small = [name for name, t in tensors.items() if t["role"] == "input" and name not in self.caches]
        self.outputs = {
            name: torch.zeros(shape, dtype=getattr(torch, tensors[name]["dtype"]), device="cuda")
            for name, shape in output_shapes(batch, self.width, settings["vocab_size"]).items()
            if name in tensors
        }
        self.pinned = {
            name: torch.empty_like(value, device="cpu").pin_memory() for name, value in self.outputs.items()
        }
        aliases = settings["aliases"][settings["step_file"]]
        for context in self.contexts:
            for name, buffer in self.caches.items():
                context.set_input_shape(name, tuple(buffer.shape))
                context.set_tensor_address(name, buffer.data_ptr())
            for name, cache in aliases.items():
                context.set_tensor_address(name, self.caches[cache].data_ptr())
            for name, buffer in self.outputs.items():
                context.set_tensor_address(name, buffer.data_ptr())
        self.inputs: dict[int, dict] = {}

    def _context(self, trt, profile: int):
        if self.captures:
            context = self.engine.create_execution_context()
        else:
            config = self.engine.create_runtime_config()
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            context = self.engine.create_execution_context(config)
        stream = self.torch.cuda.current_stream()
        if not context.set_optimization_profile_async(profile, stream.cuda_stream):
            raise UserError(f"TensorRT refused optimization profile {profile} of this engine.")
        stream.synchronize()
        return context

    @property
    def row_limit(self) -> int:
        """The last cache row a step's tokens may reach; behind it lies room for the draft's block."""
        return self.capacity - self.width

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one sequence's caches to another's."""
        for cache in self.caches.values():
            cache[target, :, :rows] = cache[source, :, :rows]

    def step(
        self,
        tokens: np.ndarray,
        num_tokens: np.ndarray,
        num_known: np.ndarray,
        lengths: np.ndarray,
        next_tokens: np.ndarray,
        sampling: Sampling | None = None,
    ) -> StepOutput:
        """Run one step, as `OnnxSession.step`; S may be up to `prefill_chunk`."""
        given = small_inputs(self, self.small, tokens, num_tokens, num_known, lengths, next_tokens, sampling)
        torch, rows = self.torch, tokens.shape[1]
        context = self.contexts[0 if rows <= self.width else 1]
        if rows not in self.inputs:  # a buffer for each shape, so that a captured graph keeps its addresses
            self.inputs[rows] = {name: torch.from_numpy(value).cuda() for name, value in given.items()}
        for name, buffer in self.inputs[rows].items():
            buffer.copy_(torch.from_numpy(given[name]))
            context.set_input_shape(name, tuple(buffer.shape))
            context.set_tensor_address(name, buffer.data_ptr())
        if rows in self.graphs:
            self.graphs[rows].replay()
        else:
            self._execute(context)
            if self.captures and rows == self.width:
                self.graphs[rows] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graphs[rows]):  # it records the step, and does not run it again
                    self._execute(context)
        stream = torch.cuda.current_stream()
        for name, buffer in self.outputs.items():
            self.pinned[name].copy_(buffer, non_blocking=True)
        stream.synchronize()
        return StepOutput(**{name: value.numpy().copy() for name, value in self.pinned.items()})

    def _execute(self, context) -> None:
        if not context.execute_async_v3(self.torch.cuda.current_stream().cuda_stream):
            raise RuntimeError("TensorRT could not run the step.")


def _libraries(engine: EngineDirectory):
    backend = engine.settings["backend"]
    try:
        trt = importlib.import_module(backend.replace("-", "_"))
    except ImportError as error:
        raise UserError(
            f"{engine.path} is a {backend} engine; running it needs {error.name}: pip install 'speccompile[{backend}]'."
        ) from None
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            f"{engine.path} is a {backend} engine and runs on an NVIDIA GPU, which PyTorch does not find here "
            "(it needs a driver and a CUDA build of torch); `speccompile inspect` reads it anywhere."
        )
    return torch, trt


def _deserialize(trt, path):
    engine = trt.Runtime(trt.Logger(trt.Logger.ERROR)).deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise UserError(
            f"{path} could not be loaded: {trt.__name__} {trt.__version__} or this GPU is not what it was built for (manifest.json and "
            "`speccompile inspect` say what is)."
        )
    return engine
