"""The engine directory: what a build writes and every reader loads.

    config.json        TensorRT-LLM's sections (`pretrained_config`, `build_config`) and ours (`speccompile`)
    rank0.onnx         the fused step            rank0.plain.onnx   plain decoding, over the same weights
    rank0.weights      every tensor of both, once
    rank0.engine       or, for TensorRT, the fused step with its weights
    rank0.pt2, rank0.plain.pt2, rank0.safetensors     or, for PyTorch, both steps and their weights
    samples.safetensors    inputs and outputs of some steps, run again when the engine is loaded
    tokenizer.json, generation_config.json, …    copied from the target
    report.json        how it was built: stages, passes, sizes, memory plan
    manifest.json      SHA-256 and size of every file, and the versions of the tools that wrote them

It is written beside its place and renamed, so that a directory under its final name is always whole.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.export.errors import UserError

CONTRACT_VERSION = 3
STEP, PLAIN, WEIGHTS = "rank0.onnx", "rank0.plain.onnx", "rank0.weights"
TENSORRT_STEP = "rank0.engine"
SAMPLES = "samples.safetensors"
TORCH_STEP, TORCH_PLAIN, TORCH_WEIGHTS = "rank0.pt2", "rank0.plain.pt2", "rank0.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_BUILDING = ".building-"


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError where the file is missing or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}).") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}; an object was expected.")
    return value


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_directory(out: Path, replace: bool, marker: str = "manifest.json") -> Iterator[Path]:
    """Yield a fresh sibling directory; rename it to `out` if the block ends well, remove it otherwise.

    Raises UserError if `out` exists and `replace` is false, or is a directory without `marker`, which this package
    did not write.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    check_destination(out, replace, marker)
    # Named before it is made, so that an interrupt at any moment finds what to remove.
    building = out.parent / f".{out.name}{_BUILDING}{os.getpid()}-{secrets.token_hex(4)}"
    _unfinished[building] = out
    try:
        building.mkdir()
        yield building
        check_destination(out, replace, marker)  # again: another build may have ended meanwhile
        if out.exists():
            out.rename(_old(building))
        building.rename(out)
    finally:
        _discard(building, out)
        del _unfinished[building]


_unfinished: dict[Path, Path] = {}
"""Directories being written in this process, and where they are to go."""


def discard_unfinished() -> None:
    """Remove what is half-written, for a process about to end without unwinding."""
    for building, out in _unfinished.items():
        _discard(building, out)


def _old(building: Path) -> Path:
    """Where the engine being replaced waits until its successor is in place."""
    return building.with_name(building.name + "-old")


def _discard(building: Path, out: Path) -> None:
    if _old(building).exists() and not out.exists():
        _old(building).rename(out)
    for left in (building, _old(building)):
        shutil.rmtree(left, ignore_errors=True)


def check_destination(out: Path, replace: bool, marker: str = "manifest.json") -> None:
    if not out.exists():
        return
    if not replace:
        raise UserError(f"{out} already exists; give --force to replace it, or another --out.")
    if not out.is_dir() or (any(out.iterdir()) and not (out / marker).exists()):
        raise UserError(
            f"{out} has no {marker}, so it is not something this command wrote; --force will not replace it."
        )


def _sweep(out: Path) -> None:
    """Remove what killed builds of the same directory left behind; put back an engine one was about to replace."""
    for left in out.parent.glob(f".{out.name}{_BUILDING}*"):
        owner = left.name.rsplit(_BUILDING, 1)[1].split("-")[0]
        if not owner.isdigit() or _alive(int(owner)):
            continue
        if left.name.endswith("-old") and not out.exists():
            left.rename(out)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def write_manifest(directory: Path, versions: dict[str, str]) -> None:
    files = {
        path.name: {"sha256": sha256(path), "bytes": path.stat().st_size}
        for path in sorted(directory.iterdir())
        if path.name != "manifest.json"
    }
    write_json(directory / "manifest.json", {"files": files, "versions": versions})


@dataclass(frozen=True)
class EngineDirectory:
    """An engine directory whose manifest has been verified."""

    path: Path
    config: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The `speccompile` section of config.json."""
        return self.config["speccompile"]

    @property
    def report(self) -> dict[str, Any]:
        return read_json(self.path / "report.json")

    @property
    def manifest(self) -> dict[str, Any]:
        return read_json(self.path / "manifest.json")


def open_engine(path: Path, verify: bool = True) -> EngineDirectory:
    """Read an engine directory. Raises UserError if it is not one, is damaged, or has another contract version."""
    if not path.is_dir():
        raise UserError(
            f"{path} is not a directory; an engine directory written by `speccompile build` was expected."
        )
    manifest = read_json(path / "manifest.json")
    files = manifest.get("files")
    if not isinstance(files, dict) or "config.json" not in files:
        raise UserError(f"{path / 'manifest.json'} lists no engine files; build the engine again.")
    if verify:
        for name, entry in files.items():
            _verify(path / name, entry)
    config = read_json(path / "config.json")
    version = config.get("speccompile", {}).get("contract_version")
    if version != CONTRACT_VERSION:
        raise UserError(
            f"{path} has step contract version {version}; this speccompile reads version {CONTRACT_VERSION}: build it again."
        )
    return EngineDirectory(path, config)


def _verify(path: Path, entry: dict[str, Any]) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing, though manifest.json lists it; build the engine again.")
    if path.stat().st_size != entry["bytes"]:
        raise UserError(
            f"{path} has {path.stat().st_size} bytes, manifest.json says {entry['bytes']}; it is damaged, build the engine again."
        )
    if sha256(path) != entry["sha256"]:
        raise UserError(
            f"{path} does not match its SHA-256 in manifest.json; it was changed, build the engine again."
        )
