"""Reads target checkpoints: safetensors only, every tensor accounted for, nothing fetched unasked."""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from speccompile.export.directory import read_json
from speccompile.export.errors import UserError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(location: str) -> Path:
    """A checkpoint directory, or a Hugging Face hub id, which is downloaded (safetensors, configs, tokenizer)."""
    path = Path(location)
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(
            f"{location} is a file; a checkpoint directory with config.json and *.safetensors was expected."
        )
    if not _HUB_ID.fullmatch(location):
        raise UserError(f"{location} is neither a directory nor a Hugging Face hub id (owner/name).")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                location, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt"]
            )
        )
    except Exception as error:
        raise UserError(
            f"{location} is not a local directory, and it could not be fetched from the Hugging Face hub ({type(error).__name__})."
        ) from None


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, each opened once to see that it is whole."""
    files = sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise UserError(f"{index} has no weight_map; save the checkpoint again.")
        files = [directory / name for name in sorted(set(shards.values()))]
    if not files:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
        if pickles:
            raise UserError(
                f"{directory / pickles[0]} is a pickle, which can run code when it is read; save the checkpoint as safetensors."
            )
        raise UserError(f"{directory} holds no *.safetensors file.")
    for file in files:
        if not file.exists():
            raise UserError(f"{file} is missing, though {index.name} lists it; copy or download it again.")
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file} is not a whole safetensors file ({error}); copy or download it again."
            ) from None
    return files


def weight_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(directory))


def target_config(directory: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The target's configuration. Raises UserError for anything but an unquantised causal language model."""
    raw = read_json(directory / "config.json")
    if "auto_map" in raw and not trust_remote_code:
        raise UserError(
            f"{directory / 'config.json'} brings its own modelling code (auto_map); read it, then give --trust-remote-code."
        )
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(
            f"{directory / 'config.json'} is not a configuration Transformers knows: {_first_line(error)}"
        ) from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "auto_map" not in raw:
        raise UserError(
            f"{directory} holds a {config.model_type!r} model, which is not a causal language model."
        )
    if config.get_text_config() is not config and config.model_type not in ("gemma3_text",):
        if not hasattr(config, "num_hidden_layers"):
            raise UserError(
                f"{directory} holds a {config.model_type!r} model with several parts; give its language model alone."
            )
    if getattr(config, "quantization_config", None):
        raise UserError(f"{directory} is quantised (quantization_config); give the unquantised checkpoint.")
    return config


def load_target(
    directory: Path, config: PretrainedConfig, dtype: str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The target in eager attention, evaluation mode. Raises UserError naming a missing, left-over or misshapen tensor."""
    weight_files(directory)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation="eager",
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        raise UserError(
            f"{directory} could not be loaded as {config.model_type!r}: {_first_line(error)}"
        ) from None
    mismatched = [
        f"{name} (file {tuple(found)}, model {tuple(wanted)})"
        for name, found, wanted in info["mismatched_keys"]
    ]
    for kind, names in (
        ("lacks the tensor", info["missing_keys"]),
        ("holds a tensor the model does not use,", info["unexpected_keys"]),
        ("disagrees with its config.json on the shape of", mismatched),
    ):
        if names:
            first, more = sorted(names)[0], len(names) - 1
            raise UserError(
                f"{directory} {kind} {first}{f' and {more} more' if more else ''}; the checkpoint is not complete and consistent."
            )
    return model.eval().requires_grad_(False)


def stop_token_ids(directory: Path, config: PretrainedConfig) -> list[int]:
    """End-of-sequence ids: the union of what config.json and generation_config.json say."""
    generation = directory / "generation_config.json"
    ids: set[int] = set()
    for found in (
        config.get_text_config().eos_token_id,
        read_json(generation).get("eos_token_id") if generation.exists() else None,
    ):
        ids |= set(found) if isinstance(found, list) else {found} - {None}
    return sorted(ids)


def _first_line(error: Exception) -> str:
    """An error's text as one line: some of Transformers' say only on the second what is wrong."""
    return " ".join(str(error).split())[:300]
