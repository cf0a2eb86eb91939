"""What can run an engine, and what each needs of a build."""

from dataclasses import dataclass

from speccompile.export.directory import PLAIN, STEP, TENSORRT_STEP, TORCH_PLAIN, TORCH_STEP
from speccompile.export.errors import UserError


@dataclass(frozen=True)
class Backend:
    """`dtypes`: what it computes in, the default first. `lowering`: passes and translations it takes."""

    name: str
    runs_on: str
    dtypes: tuple[str, ...]
    lowering: str
    step_file: str
    plain_file: str | None
    """Plain decoding beside the step, where the back end writes it."""
    kind: str = "onnx"
    """What its files are: "onnx", "torch" (exported programs) or "tensorrt"."""
    library: str | None = None
    """TensorRT: the module that builds and runs it."""


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("onnxruntime", "CPU", ("float32", "float16"), "onnxruntime", STEP, PLAIN),
        Backend(
            "torch",
            "CUDA GPU with PyTorch, or CPU",
            ("bfloat16", "float16", "float32"),
            "torch",
            TORCH_STEP,
            TORCH_PLAIN,
            "torch",
        ),
        Backend(
            "tensorrt-rtx",
            "NVIDIA GPUs of compute capability 7.5 to 12.1, but 9.0 and 10.0",
            ("float16", "bfloat16"),
            "tensorrt-rtx",
            TENSORRT_STEP,
            None,
            "tensorrt",
            "tensorrt_rtx",
        ),
        Backend(
            "tensorrt",
            "GPU like the one it is built on",
            ("float16", "bfloat16", "float32"),
            "tensorrt-plugin",
            TENSORRT_STEP,
            None,
            "tensorrt",
            "tensorrt",
        ),
    )
}


def choose(name: str) -> Backend:
    if name not in BACKENDS:
        raise UserError(f"--backend {name} is not available; choose one of: {', '.join(BACKENDS)}.")
    return BACKENDS[name]
