"""What an engine needs in memory, from its configuration alone."""

from typing import Any

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def cache_bytes(settings: dict[str, Any], owner: str, batch: int = 1) -> int:
    """Bytes of the caches of `owner` ("target" or "draft") for `batch` sequences at full capacity."""
    size = _BYTES[settings["dtype"]]
    rows = settings["capacity"]
    return batch * sum(
        cache["heads"] * rows * cache["size"] * size
        for name, cache in settings["caches"].items()
        if name.startswith(f"{owner}.")
    )


def human(count: float) -> str:
    """1536 -> '1.5 KiB'"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
