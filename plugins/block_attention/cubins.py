"""Compiles the block-attention kernel to cubins ahead of time; no GPU and no CUDA toolkit is needed.

    python -m speccompile.plugins.block_attention.cubins --sm 80,90 --head-size 64,128

prints every variant's registers, shared memory and spills, and exits with 1 if one spills.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as Triton up to 3.9 compiles by default

import triton  # noqa: E402
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from typer import Exit, Option, run

from speccompile.plugins.block_attention import kernel

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
_POINTERS = {"at": "i64", "tree_mask": "i8", "partial_m": "fp32", "partial_l": "fp32", "partial_acc": "fp32"}
_FLOATS = ("scale", "softcap")
_DIVISIBLE = re.compile(r"_(batch|head|row)$")  # strides: head sizes are multiples of 16


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel. `name` is its entry point; `shared` and `spilled` in bytes, the latter a thread's."""

    name: str
    kernel: str
    sm: int
    dtype: str
    head_size: int
    block_m: int
    split: bool
    warps: int
    registers: int
    shared: int
    spilled: int
    code: bytes


def compile_kernels(sm: int, head_size: int, dtype: str) -> list[Cubin]:
    """All variants for one architecture (`sm` 89 is compute capability 8.9), head size and dtype."""
    cubins = []
    for rows in (16, 64):
        block = kernel.tiles(1, rows, head_size)
        options = {name: block.pop(name) for name in ("num_warps", "num_stages")}
        for split in (False, True):
            constants = {"SIZE": head_size, "SPLIT": split, **block}
            cubins.append(_compile(kernel.attend, sm, head_size, dtype, rows, split, constants, options))
    constants = {"SIZE": head_size, "BLOCK_D": block["BLOCK_D"], "BLOCK_SPLITS": kernel.MAX_SPLITS}
    cubins.append(_compile(kernel.combine, sm, head_size, dtype, 1, True, constants, {"num_warps": 4}))
    constants = {"SIZE": head_size, "BLOCK_D": block["BLOCK_D"], "BLOCK_N": kernel.APPEND_ROWS}
    cubins.append(
        _compile(kernel.append, sm, head_size, dtype, kernel.APPEND_ROWS, False, constants, {"num_warps": 4})
    )
    return cubins


def _compile(function, sm, head_size, dtype, block_m, split, constants, options) -> Cubin:
    if not hasattr(function, "signature"):
        raise RuntimeError("TRITON_INTERPRET is set: the kernel is interpreted and cannot be compiled.")
    signature, hints = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in _FLOATS:
            signature[name] = "fp32"
        elif name in _POINTERS or name in (
            "q",
            "k",
            "v",
            "key_cache",
            "value_cache",
            "sinks",
            "out",
            "cache",
            "new",
        ):
            signature[name] = "*" + _POINTERS.get(name, DTYPES[dtype])
            hints[index,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if _DIVISIBLE.search(name):
                hints[index,] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    code = compiled.asm["cubin"]
    registers, spilled = _resources(code)
    name = compiled.metadata.name
    return Cubin(
        name, function.__name__, sm, dtype, head_size, block_m, split,
        compiled.metadata.num_warps, registers, compiled.metadata.shared, spilled, code,
    )  # fmt: skip


def _resources(code: bytes) -> tuple[int, int]:
    """Registers and spilled bytes a thread, as `cuobjdump` (which comes with Triton) reads them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return int(registers), int(stack)


def main(
    sm: str = Option(",".join(map(str, ARCHITECTURES)), help="Architectures, as 80,89."),
    head_size: str = Option("64,128", help="Head sizes, multiples of 16 up to 256."),
    dtype: str = Option("float16,bfloat16", help="Data types of queries and caches."),
) -> None:
    wanted = [
        (int(architecture), int(size), kind)
        for architecture in sm.split(",")
        for size in head_size.split(",")
        for kind in dtype.split(",")
    ]
    columns = (
        "kernel",
        "sm",
        "dtype",
        "head size",
        "rows",
        "split",
        "warps",
        "registers",
        "shared B",
        "spilled B",
        "cubin B",
    )
    table, spilled = Table(*columns), 0
    for variant in track(wanted, "Compiling", console=Console(stderr=True)):
        for c in compile_kernels(*variant):
            spilled += c.spilled > 0
            table.add_row(
                *map(
                    str,
                    (
                        c.kernel,
                        c.sm,
                        c.dtype,
                        c.head_size,
                        c.block_m,
                        c.split,
                        c.warps,
                        c.registers,
                        c.shared,
                        c.spilled,
                        len(c.code),
                    ),
                )
            )
    Console(width=120).print(table)
    raise Exit(1 if spilled else 0)


if __name__ == "__main__":
    run(main)
