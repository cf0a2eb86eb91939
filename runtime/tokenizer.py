"""The engine's own tokenizer: text to token ids and back, chat template included."""

from pathlib import Path

from speccompile.export.directory import EngineDirectory, read_json
from speccompile.export.errors import UserError


def load_tokenizer(engine: EngineDirectory):
    """The target's tokenizer, as a Transformers tokenizer. Raises UserError where the engine has none."""
    if not (engine.path / "tokenizer_config.json").exists() and not (engine.path / "tokenizer.json").exists():
        raise UserError(f"{engine.path} holds no tokenizer (its target had none); give the prompt as --prompt-ids.")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(engine.path, trust_remote_code=False)


def stop_token_ids(directory: Path) -> list[int]:
    """End-of-sequence ids: the union of generation_config.json's and tokenizer_config.json's `eos_token`."""
    ids: set[int] = set()
    if (directory / "generation_config.json").exists():
        found = read_json(directory / "generation_config.json").get("eos_token_id")
        ids |= set(found if isinstance(found, list) else [found] if found is not None else [])
    return sorted(ids)
