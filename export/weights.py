"""One external weights file for several ONNX models over the same tensors."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import onnx_ir as ir

ALIGNMENT = 4096  # pages, so that a runtime can map a tensor instead of reading it
INLINE_BYTES = 1024  # smaller tensors stay in the model file, where shape inference can see them


def externalise(
    models: Iterable[ir.Model], path: Path, progress: Callable[[int], None] = lambda written: None
) -> int:
    """Write every large initializer of the models to `path`, each distinct storage once; the models then refer to it.

    Returns the bytes written. Call before saving the models into the same directory.
    """
    placed: dict[tuple, ir.ExternalTensor] = {}
    end = 0
    with path.open("wb") as file:
        for model in models:
            for value in model.graph.initializers.values():
                tensor = value.const_value
                if tensor.nbytes <= INLINE_BYTES:
                    continue
                raw = tensor.raw.detach() if hasattr(tensor.raw, "detach") else None
                key = (raw.data_ptr(), tensor.nbytes) if raw is not None else (id(tensor.raw), tensor.nbytes)
                if key not in placed:
                    file.seek(end + -end % ALIGNMENT)
                    offset = file.tell()
                    file.write(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8))
                    end = offset + tensor.nbytes
                    placed[key] = ir.ExternalTensor(
                        path.name,
                        offset,
                        tensor.nbytes,
                        tensor.dtype,
                        shape=tensor.shape,
                        name=value.name,
                        base_dir=path.parent,
                    )
                    progress(tensor.nbytes)
                twin = placed[key]
                value.const_value = ir.ExternalTensor(
                    path.name,
                    twin.offset,
                    twin.length,
                    tensor.dtype,
                    shape=tensor.shape,
                    name=value.name,
                    base_dir=path.parent,
                )
    return end
