"""Finds a server's launch command in what people keep it in: a command line, a script, a Dockerfile, YAML of several kinds."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from speccompile.export.errors import UserError

LAUNCHERS = {
    "sglang": (r"sglang\.launch_server", r"sglang\s+serve"),
    "vllm": (r"vllm\s+serve", r"vllm\.entrypoints\.\S*api_server"),
    "tensorrt-llm": (r"trtllm-serve(?:\s+serve)?",),
}
ENDS = {"&&", "||", ";", "|", "&", ">", ">>", "2>&1", "<"}


@dataclass
class Launch:
    """A server and what it was told: flags by their names without dashes in front, positional arguments."""

    server: str
    flags: dict[str, Any] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)


def find_launch(source: str) -> Launch:
    """The launch that `source` (a command line, or a path to a file that holds one) asks for. Raises UserError."""
    path = Path(source)
    try:
        is_file = path.is_file()
    except OSError:  # too long for a path
        is_file = False
    if not is_file and not re.search(r"\s", source.strip()):
        raise UserError(
            f"{source} is neither a file nor a command line; give the launch command in quotes, or a file that holds it."
        )
    try:
        text = path.read_text(encoding="utf-8") if is_file else source
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source} cannot be read as text ({error}).") from None
    found = (
        list(_in_yaml(text, source)) if is_file and path.suffix in (".yaml", ".yml") else list(_in_text(text))
    )
    if not found:
        names = "sglang.launch_server, sglang serve, vllm serve or trtllm-serve"
        raise UserError(
            f"{source if is_file else 'The command line'} holds no launch of {names}, and no configuration of one."
        )
    if len(found) > 1:
        raise UserError(
            f"{source} holds {len(found)} launches; give the one to port as a command line in quotes."
        )
    return found[0]


def _in_text(text: str) -> Iterator[Launch]:
    joined = re.sub(r"\\\r?\n", " ", text)
    for line in joined.splitlines():
        line = line.strip()
        if line.startswith("#"):
            continue
        words = _exec_form(line) or _words(line)
        launch = _launch_of(words)
        if launch is not None:
            yield launch


def _exec_form(line: str) -> list[str] | None:
    """A Dockerfile's CMD or ENTRYPOINT as a JSON list."""
    match = re.match(r"(?:CMD|ENTRYPOINT)\s+(\[.*\])\s*$", line, re.IGNORECASE)
    if not match:
        return None
    try:
        return [str(word) for word in json.loads(match[1])]
    except json.JSONDecodeError:
        return None


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UserError(f"A line cannot be read as a command ({error}): {line[:120]}") from None


def _launch_of(words: list[str]) -> Launch | None:
    """The launch in a list of words, a shell's `-c` text included."""
    for index, word in enumerate(words):
        if (
            re.search(r"\s", word)
            and index
            and words[index - 1].startswith("-")
            and words[index - 1].endswith("c")
        ):
            inner = next(_in_text(word), None)
            if inner is not None:
                return inner
    for server, patterns in LAUNCHERS.items():
        for start in range(len(words)):
            for length in (1, 2):
                if any(
                    re.fullmatch(rf"(?:\S*/)?{p}", " ".join(words[start : start + length])) for p in patterns
                ):
                    return _parse(server, words[start + length :])
    return None


def _parse(server: str, words: list[str]) -> Launch:
    launch, name = Launch(server), None
    for word in words:
        if word in ENDS:
            break
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("_", "-")
            launch.flags[name] = value if equals else True
            name = None if equals else name
        elif name is not None:
            launch.flags[name] = word if launch.flags[name] is True else f"{launch.flags[name]} {word}"
        else:
            launch.positional.append(word)
    return launch


def _in_yaml(text: str, source: str) -> Iterator[Launch]:
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not YAML ({str(error).splitlines()[0]}).") from None
    for document in documents:
        yield from _walk(document)


def _walk(value: Any) -> Iterator[Launch]:
    if isinstance(value, list):
        for item in value:
            yield from _walk(item)
    if not isinstance(value, dict):
        return
    words: list[str] = []
    for key in ("entrypoint", "command", "args"):  # of a container, in Kubernetes' or Compose's words
        given = value.get(key)
        words += (
            _words(re.sub(r"\\\r?\n", " ", given))
            if isinstance(given, str)
            else [str(w) for w in given or []]
        )
    launch = _launch_of(words) if words else None
    if launch is not None:
        yield launch
        return
    names = {str(key).replace("_", "-"): item for key, item in value.items()}
    if "speculative-algorithm" in names:
        yield Launch("sglang", {k: v for k, v in names.items() if v is not False and v is not None})
    elif isinstance(names.get("speculative-config"), dict) and "decoding-type" in {
        str(k).replace("_", "-") for k in names["speculative-config"]
    }:
        yield Launch("tensorrt-llm", names)
    elif "speculative-config" in names:
        yield Launch("vllm", names)
    else:
        for item in value.values():
            yield from _walk(item)
