"""Our own dialect: the internal description as flat JSON."""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from speccompile.compiler.drafts.config import OUR_ARCHITECTURE, DraftConfig
from speccompile.export.errors import UserError

_GENERIC = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}


def read(raw: dict[str, Any], source: Path, target_layers: int | None = None) -> DraftConfig:
    known = {field.name: field for field in fields(DraftConfig) if field.name != "dialect"}
    for key in raw:
        if key not in known and key not in _GENERIC:
            raise UserError(
                f"{source}: the key {key} is not one of a {OUR_ARCHITECTURE} configuration; remove it or check its spelling."
            )
    for name, field in known.items():
        if name not in raw and field.default is MISSING:
            raise UserError(
                f"{source} lacks {name}; nothing is guessed, so add the value the draft was trained with."
            )
    values = {name: raw[name] for name in known if name in raw}
    for name in ("tapped_hidden_states", "causal", "windows"):
        if not isinstance(values[name], list):
            raise UserError(f"{source}: {name} is {values[name]!r}; a list was expected.")
        values[name] = tuple(values[name])
    return DraftConfig(**values)
