"""A launch to the commands that stand in for it, checked against the checkpoints where they are at hand."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from speccompile.compiler.port import others, sglang
from speccompile.compiler.port.launch import Launch
from speccompile.compiler.port.plan import MISSING, PORTED, UNKNOWN, Line, Ported, Rule
from speccompile.export.errors import UserError

SECRET = ("api-key", "admin-api-key")


def port(launch: Launch, backend: str, out: str) -> Ported:
    """Raises UserError where nothing here does what the launch asks for."""
    ported = Ported(launch.server)
    flags = dict(launch.flags)
    if launch.server == "sglang":
        flags = {sglang.ALIASES.get(name, name): value for name, value in flags.items()}
        sglang.check(flags)
        ported.algorithm = str(flags["speculative-algorithm"]).upper()
        _apply(ported, flags, sglang.RULES)
    else:
        rules, inner = (
            (others.VLLM, others.VLLM_CONFIG)
            if launch.server == "vllm"
            else (others.TENSORRT_LLM, others.TENSORRT_LLM_CONFIG)
        )
        if launch.positional:
            flags = {"model": launch.positional[0]} | flags
        config = others.speculative_config(launch.server, flags.pop("speculative-config", None))
        _apply(ported, config, inner, "speculative-config ")
        _apply(ported, flags, rules)
    for needed, what in (("target", "model"), ("draft", "draft")):
        if needed not in ported.build:
            ported.build[needed] = f"PATH_OF_THE_{needed.upper()}"
            ported.warnings.append(
                f"The launch does not name its {what}; put it in place of {ported.build[needed]}."
            )
    ported.build |= {"sampling": None, "backend": backend, "out": out}
    ported.lines.append(
        Line(
            "",
            "",
            PORTED,
            "build --sampling: requests may sample, as they may there; leave it out if all are greedy",
        )
    )
    if backend == "torch" and "dtype" not in ported.build:
        ported.lines.append(
            Line("", "", PORTED, "build --backend torch: a CUDA GPU; bfloat16 unless --dtype says otherwise")
        )
    _check_checkpoints(ported)
    return ported


def _apply(ported: Ported, flags: dict[str, Any], rules: dict[str, Rule], prefix: str = "") -> None:
    for name, value in flags.items():
        shown = "" if value is True else "…" if name in SECRET else str(value)
        if name not in rules:
            ported.lines.append(
                Line(prefix + name, shown, UNKNOWN, "not known here; look it up before you leave it out")
            )
            continue
        try:
            outcome, note = rules[name](ported, value)
        except (TypeError, ValueError):
            raise UserError(f"{prefix}{name} is {shown!r}, which is not the number it should be.") from None
        ported.lines.append(Line(prefix + name, shown, outcome, note))


def _check_checkpoints(ported: Ported) -> None:
    """Where both directories are here, resolve the draft as `build` would, and warn of what it would refuse."""
    from speccompile.compiler import checkpoint
    from speccompile.compiler.drafts.loading import resolve_draft

    target, draft = Path(ported.build["target"]), Path(ported.build["draft"])
    if not (target.is_dir() and draft.is_dir()):
        ported.warnings.append(
            "The checkpoints are not both directories here, so the draft was not checked against its target; `build` does that."
        )
        return
    try:
        config = checkpoint.target_config(target, "trust-remote-code" in ported.build)
        resolved = resolve_draft(draft, config)
    except UserError as error:
        ported.warnings.append(f"`build` would refuse this pair: {error}")
        return
    ported.lines.append(
        Line(
            "",
            "",
            PORTED,
            f"the draft is {resolved.family}, trained at {resolved.block_width} rows, for a {config.model_type} target",
        )
    )
    if ported.algorithm == "DSPARK" and resolved.confidence != "none":
        ported.lines.append(
            Line(
                "",
                "",
                MISSING,
                "DSPARK's load-aware block cut; build --confidence-threshold cuts at a fixed confidence",
            )
        )


def command(name: str, options: dict[str, str | None], positional: str = "") -> str:
    words = ["speccompile", name, *([positional] if positional else [])]
    for option, value in options.items():
        words += [f"--{option}", *([] if value is None else [value])]
    return shlex.join(words)


def as_json(ported: Ported, out: str) -> dict[str, Any]:
    return {
        "server": ported.server,
        "build": command("build", {name: ported.build[name] for name in ("target", "draft")} | ported.build),
        "verify": command("verify", {}, out),
        "serve": command("serve", ported.serve, out),
        "environment": sorted(ported.environment),
        "flags": [asdict(line) for line in ported.lines if line.flag],
        "notes": [line.note for line in ported.lines if not line.flag],
        "warnings": ported.warnings,
    }
