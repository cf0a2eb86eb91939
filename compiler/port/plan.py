"""What the flags of other servers become here. A rule gives a `Line` of the table, and adds to the commands."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PORTED, CHANGED, NOT_NEEDED, MISSING, UNKNOWN = "ported", "changed", "not needed", "no counterpart", "unknown"


@dataclass
class Line:
    """One flag of theirs: `outcome` is one of the constants above, `note` what it became or why not."""

    flag: str
    value: str
    outcome: str
    note: str


@dataclass
class Ported:
    """The commands, option by option (a value of None is a switch), and what became of every flag."""

    server: str
    algorithm: str = ""
    """SGLang's, in capitals."""
    build: dict[str, str | None] = field(default_factory=dict)
    serve: dict[str, str | None] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


Rule = Callable[[Ported, Any], tuple[str, str]]
"""(commands so far, the flag's value) -> (outcome, note)"""


def build_option(
    option: str, change: Callable[[Any], Any] = str, note: str = "", outcome: str = PORTED
) -> Rule:
    def rule(ported: Ported, value: Any) -> tuple[str, str]:
        ported.build[option] = str(change(value))
        return outcome, f"build --{option} {ported.build[option]}" + (f"; {note}" if note else "")

    return rule


def serve_option(option: str, note: str = "") -> Rule:
    def rule(ported: Ported, value: Any) -> tuple[str, str]:
        ported.serve[option] = str(value)
        return PORTED, f"serve --{option} {value}" + (f"; {note}" if note else "")

    return rule


def missing(note: str) -> Rule:
    return lambda ported, value: (MISSING, note)


def not_needed(note: str) -> Rule:
    return lambda ported, value: (NOT_NEEDED, note)


def parallel(what: str) -> Rule:
    """One device: a size of 1 needs nothing, any other cannot be had."""

    def rule(ported: Ported, value: Any) -> tuple[str, str]:
        if str(value) in ("1", "True", "None"):
            return NOT_NEEDED, "one device"
        ported.warnings.append(
            f"{what} over {value} devices has no counterpart: an engine runs on one device, and the pair must fit on it."
        )
        return MISSING, f"{what}: an engine runs on one device"

    return rule


def dtype(ported: Ported, value: Any) -> tuple[str, str]:
    known = {
        "half": "float16",
        "float16": "float16",
        "bfloat16": "bfloat16",
        "float": "float32",
        "float32": "float32",
    }
    if value == "auto":
        return NOT_NEEDED, "the back end's default"
    if value not in known:
        return MISSING, "weights are float32, float16 or bfloat16"
    ported.build["dtype"] = known[value]
    return PORTED, f"build --dtype {known[value]}"


def api_key(ported: Ported, value: Any) -> tuple[str, str]:
    ported.environment["SPECCOMPILE_API_KEY"] = "…"  # never repeated
    return PORTED, "SPECCOMPILE_API_KEY in the environment of serve"


def trust_remote_code(ported: Ported, value: Any) -> tuple[str, str]:
    ported.build["trust-remote-code"] = None
    return PORTED, "build --trust-remote-code"


def quantization(ported: Ported, value: Any) -> tuple[str, str]:
    if value in ("auto", "None", None):
        return NOT_NEEDED, "as the checkpoint is"
    ported.warnings.append(
        f"Quantisation ({value}) has no counterpart: give checkpoints in 16 or 32 bits; the weights take that much more memory."
    )
    return MISSING, "checkpoints in 16 or 32 bits only"


def memory_share(ported: Ported, value: Any) -> tuple[str, str]:
    return (
        CHANGED,
        "caches are allocated whole: max-batch-size × max-seq-len rows; `inspect` prints their size, so choose both to fit",
    )


def cache_dtype(ported: Ported, value: Any) -> tuple[str, str]:
    return (NOT_NEEDED, "the model's own") if value == "auto" else (MISSING, "caches have the weights' type")


def revision(whose: str) -> Rule:
    return missing(f"download that revision of the {whose} and give its directory")


ENGINE_TUNING = not_needed("the engine has one kernel for it")
