"""Draft checkpoints to modules and back: every tensor claimed, checked and named; safetensors only."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PretrainedConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from speccompile.compiler.checkpoint import DTYPES, weight_files
from speccompile.compiler.drafts.block import BlockDraft
from speccompile.compiler.drafts.chain import ChainDraft
from speccompile.compiler.drafts.check import check_target
from speccompile.compiler.drafts.config import DraftConfig
from speccompile.compiler.drafts.dialects import Dialect, read_draft_config, recognise
from speccompile.compiler.drafts.parts import Draft
from speccompile.export.directory import read_json
from speccompile.export.errors import UserError

_WRAPPERS = ("module.", "draft_model.", "model.")


def module_name(name: str, dialect: Dialect) -> str | None:
    """A checkpoint's tensor name as this module's parameter name; None for a tensor that no reader needs."""
    for prefix in _WRAPPERS:
        name = name.removeprefix(prefix)
    if name.startswith(("rotary_emb.", *dialect.ignored)):
        return None
    for old, new in dialect.renames:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def resolve_draft(directory: Path, target: PretrainedConfig | None = None) -> DraftConfig:
    """The draft's configuration, checked against the target it is to serve, if one is given."""
    source = directory / "config.json"
    raw = read_json(source)
    dialect = recognise(raw, source)
    for name in ("mask_embedding.pt", "mask_embedding.bin"):
        if (directory / name).exists():
            raise UserError(
                f"{directory / name} is a pickle, and it would replace the mask token's embedding; save its vector into the checkpoint's safetensors."
            )
    text = target.get_text_config() if target is not None else None
    config = read_draft_config(
        raw, source, _names(directory, dialect), text.num_hidden_layers if text is not None else None
    )
    if text is not None:
        check_target(config, text.hidden_size, text.vocab_size, text.num_hidden_layers, source)
    return config


def _names(directory: Path, dialect: Dialect) -> set[str]:
    names = set()
    for file in weight_files(directory):
        with safe_open(file, "pt") as tensors:
            names |= {module_name(name, dialect) for name in tensors.keys()}
    return names - {None}


def empty_draft(config: DraftConfig) -> Draft:
    """The module of a configuration, with whatever weights PyTorch gives it."""
    return (ChainDraft if config.backbone == "chain" else BlockDraft)(config)


def load_draft(directory: Path, config: DraftConfig, dtype: str | None) -> Draft:
    """The draft module with the checkpoint's weights, in their own types if `dtype` is None. Raises UserError naming a missing, left-over or misshapen tensor."""
    with torch.device(
        "meta"
    ):  # no memory is taken for what config.json says before the tensors have said the same
        draft = empty_draft(config)
    expected = {
        name: tensor for name, tensor in draft.state_dict().items() if name not in ("embedding", "head")
    }
    dialect = recognise(read_json(directory / "config.json"), directory / "config.json")
    state: dict[str, torch.Tensor] = {}
    t2d = None
    for file in weight_files(directory):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                if name.split(".")[-1] == "t2d":
                    t2d = tensors.get_tensor(name)
                plain = module_name(name, dialect)
                if plain is None:
                    continue
                if config.backbone == "chain":
                    plain = _further_chain_layer(plain, tensors.keys(), name, file)
                if plain == "d2t" and config.draft_vocab_size is None:
                    _check_identity(tensors.get_tensor(name), config, file)
                    continue
                tensor = _checked(tensors.get_tensor(name), name, expected.get(plain), config, file)
                if plain in state:
                    raise UserError(
                        f"{file} holds the tensor {plain} under two names, the second {name}; keep one."
                    )
                state[plain] = tensor
    missing = sorted(set(expected) - set(state))
    if missing:
        raise UserError(
            f"{directory} lacks the tensor {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}, which its config.json asks for."
        )
    if "d2t" in state:
        _check_map(state["d2t"], t2d, config, directory)
    draft.load_state_dict(state, assign=True)
    draft.rotary_emb = Qwen3RotaryEmbedding(config.rotary())  # computed, not stored
    if dtype is not None:
        for (
            parameter
        ) in draft.parameters():  # not the buffers: rotary frequencies stay float32, as in Transformers
            parameter.data = parameter.data.to(DTYPES[dtype])
    return draft.eval().requires_grad_(False)


def _further_chain_layer(plain: str, present, name: str, file: Path) -> str:
    """SGLang's chains of several layers norm the hidden state of layers 1, 2, … by `hidden_norm`."""
    parts = plain.split(".")
    if parts[0] != "layers" or parts[1] == "0" or parts[2] != "hidden_norm":
        return plain
    twin = name.replace("hidden_norm", "input_layernorm")
    if twin in present:
        raise UserError(
            f"{file} holds both {name} and {twin}; which of them norms that layer's input cannot be told, so the draft is refused."
        )
    return plain.replace("hidden_norm", "input_layernorm")


def _checked(
    tensor: torch.Tensor, name: str, wanted: torch.Tensor | None, config: DraftConfig, file: Path
) -> torch.Tensor:
    if wanted is None:
        raise UserError(
            f"{file} holds the tensor {name}, which a {config.family} draft does not use; this draft is of another kind."
        )
    if tensor.shape != wanted.shape:
        raise UserError(
            f"{file}: tensor {name} has shape {tuple(tensor.shape)}, but config.json asks for {tuple(wanted.shape)}."
        )
    if tensor.is_floating_point() != wanted.is_floating_point():
        kind = "floating-point weights were" if wanted.is_floating_point() else "whole numbers were"
        raise UserError(f"{file}: tensor {name} holds {tensor.dtype}; {kind} expected.")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise UserError(
            f"{file}: tensor {name} holds values that are not finite numbers; the checkpoint was not saved whole."
        )
    return tensor


def _check_identity(d2t: torch.Tensor, config: DraftConfig, file: Path) -> None:
    if len(d2t) != config.vocab_size or bool(d2t.any()):
        raise UserError(
            f"{file}: d2t maps {len(d2t)} draft tokens, but config.json has no draft_vocab_size, so the draft's vocabulary is the target's {config.vocab_size} "
            "tokens, of which the only map is all zeros."
        )


def _check_map(d2t: torch.Tensor, t2d: torch.Tensor | None, config: DraftConfig, directory: Path) -> None:
    """`d2t` holds offsets: draft token i is the target's token i + d2t[i]."""
    mapped = torch.arange(len(d2t)) + d2t
    if int(mapped.min()) < 0 or int(mapped.max()) >= config.vocab_size:
        worst = int(mapped.max()) if int(mapped.max()) >= config.vocab_size else int(mapped.min())
        raise UserError(
            f"{directory}: d2t maps a draft token to {worst}, outside the target's {config.vocab_size} tokens; d2t must hold offsets, target id minus draft id."
        )
    if len(mapped.unique()) != len(mapped):
        raise UserError(
            f"{directory}: d2t maps two draft tokens to one target token; it must hold offsets, target id minus draft id."
        )
    if t2d is not None:
        used = torch.zeros(len(t2d), dtype=torch.bool)
        if len(t2d) <= int(mapped.max()):
            raise UserError(
                f"{directory}: t2d has {len(t2d)} entries, but d2t maps to token {int(mapped.max())}."
            )
        used[mapped] = True
        if not torch.equal(used, t2d.bool()):
            raise UserError(
                f"{directory}: t2d and d2t disagree on which {len(d2t)} of the target's tokens the draft knows."
            )


def save_draft(draft: Draft, out: Path) -> None:
    """Write config.json in our own dialect and model.safetensors (without what is the target's)."""
    from safetensors.torch import save_file

    state = {k: v.contiguous() for k, v in draft.state_dict().items() if k not in ("embedding", "head")}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(draft.config.to_json(), indent=2) + "\n")
