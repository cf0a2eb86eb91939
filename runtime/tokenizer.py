"""The engine's own tokenizer: text to token ids and back, chat template included."""

from speccompile.export.directory import EngineDirectory
from speccompile.export.errors import UserError


def load_tokenizer(engine: EngineDirectory):
    """The target's tokenizer, as a Transformers tokenizer. Raises UserError where the engine has none."""
    if not (engine.path / "tokenizer_config.json").exists() and not (engine.path / "tokenizer.json").exists():
        raise UserError(
            f"{engine.path} holds no tokenizer (its target had none); give the prompt as --prompt-ids."
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(engine.path, trust_remote_code=False)


def chat_ids(tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer. Raises UserError where there is no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "This engine's tokenizer has no chat template; give the text with --prompt and without --chat."
        )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return list(ids)
