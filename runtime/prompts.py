"""Prompts of a user's own, in the forms they lie about in: JSON lines, ShareGPT, the OpenAI batch format, plain text."""

import json
from pathlib import Path
from typing import Any

from speccompile.export.errors import UserError
from speccompile.runtime.generation import Engine
from speccompile.runtime.tokenizer import chat_ids

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def load_prompts(path: Path, engine: Engine, limit: int | None = None) -> list[list[int]]:
    """Token ids of up to `limit` prompts that leave the engine room for one token.

    `.txt`: a prompt a line. Otherwise a JSON list, or an object a line, each with `prompt` (text or token ids), `messages`, ShareGPT's
    `conversations` (up to the last question), or OpenAI's batch `body` with one of these. Raises UserError with the line.
    """
    prompts = []
    for number, entry in _entries(path):
        if limit is not None and len(prompts) == limit:
            break
        ids = _ids(entry, engine, f"{path}, entry {number}")
        if 1 <= len(ids) <= engine.settings["max_seq_len"]:
            prompts.append(ids)
    if not prompts:
        raise UserError(f"{path} holds no prompt of 1 to {engine.settings['max_seq_len']} tokens.")
    return prompts


def _entries(path: Path) -> list[tuple[int, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}).") from None
    if path.suffix == ".txt":
        return [(n, {"prompt": line}) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if text.lstrip().startswith("["):
        lines = [(1, text)]
    else:
        lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    entries = []
    for number, line in lines:
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {number}, is not JSON ({error}); give JSON lines, a JSON list, or a .txt file."
            ) from None
        entries += enumerate(value, 1) if isinstance(value, list) else [(number, value)]
    return entries


def _ids(entry: Any, engine: Engine, where: str) -> list[int]:
    if isinstance(entry, dict) and isinstance(entry.get("body"), dict):
        entry = entry["body"]
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if isinstance(entry, dict):
        prompt = entry.get("prompt")
        if isinstance(prompt, str) and prompt:
            return engine.tokenizer.encode(prompt)
        if isinstance(prompt, list) and prompt and all(isinstance(t, int) for t in prompt):
            return prompt
        messages = entry.get("messages") or _conversation(entry.get("conversations"))
        if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
            return chat_ids(engine.tokenizer, messages)
    raise UserError(f"{where} has none of prompt, messages and conversations in a form that is understood.")


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )


def _conversation(turns: Any) -> list[dict[str, str]] | None:
    """ShareGPT's turns up to the last that is not an answer."""
    if not isinstance(turns, list):
        return None
    messages = [
        {"role": ROLES[turn["from"]], "content": turn["value"]}
        for turn in turns
        if isinstance(turn, dict) and turn.get("from") in ROLES and isinstance(turn.get("value"), str)
    ]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages
