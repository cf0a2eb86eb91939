"""The checkpoint dialects: how each is recognised, read, and how its tensors are named.

`DIALECTS` is the table. `recognise` takes the one entry that claims a config.json; more than one is an ambiguity and
none an unknown draft, and both are refused. Names on the right of `renames` are the modules' of `block.py` and `chain.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speccompile.compiler.drafts import read_block, read_chain, read_ours
from speccompile.compiler.drafts.check import check_config
from speccompile.compiler.drafts.config import OUR_ARCHITECTURE, DraftConfig
from speccompile.export.errors import UserError

Reader = Callable[[dict[str, Any], Path, int | None], DraftConfig]


@dataclass(frozen=True)
class Dialect:
    """One way in which drafts are published."""

    name: str
    families: str
    recognised_by: str
    claims: Callable[[dict[str, Any], dict[str, Any]], bool]
    """(config.json, its `dflash_config`) -> whether this dialect wrote it."""
    read: Reader
    """(config.json, its path for messages, the target's layer count if known) -> the internal description."""
    renames: tuple[tuple[str, str], ...] = ()
    """Prefixes of tensor names, old and new."""
    ignored: tuple[str, ...] = ()
    """Prefixes of tensors that a reader does not need."""


def _first_architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _architecture(*names: str) -> Callable[[dict, dict], bool]:
    return lambda raw, nested: _first_architecture(raw) in names


def _projector(*types: str) -> Callable[[dict, dict], bool]:
    return lambda raw, nested: nested.get("projector_type", raw.get("projector_type")) in types


def _any_key(*keys: str) -> Callable[[dict, dict], bool]:
    return lambda raw, nested: any(raw.get(k) is not None or nested.get(k) is not None for k in keys)


def _either(*claims: Callable[[dict, dict], bool]) -> Callable[[dict, dict], bool]:
    return lambda raw, nested: any(claim(raw, nested) for claim in claims)


_TAP_NORMS = (
    ("aux_norm_low.", "tap_norms.0."),
    ("aux_norm_mid.", "tap_norms.1."),
    ("aux_norm_high.", "tap_norms.2."),
    ("fc_norm.", "tap_norms."),
    ("input_norm.", "tap_norm."),
)
_SPECULATORS = {
    "dflash": ("dflash", read_block.read_speculators),
    "dflash2": ("dflash2", read_block.read_speculators),
    "dspark": ("dspark", read_block.read_speculators),
    "xpress": ("xpress", read_block.read_speculators),
    "eagle3": ("eagle3", read_chain.read_speculators),
}
_CODEBOOKS = tuple(
    (f"candidate_selector.{side}_codebook.weight", f"candidate_selector.{side}_codebook")
    for side in ("predecessor", "successor")
)
_EARLY_HEADS = (
    ("logit_head.prefix_gru.", "domino_head.prefix_gru."),
    ("logit_head.embed_proj.", "domino_head.embed_proj."),
    ("logit_head.", ""),
    ("prefix_gru.", "domino_head.prefix_gru."),
    ("embed_proj.", "domino_head.embed_proj."),
)
_MUSE = (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."))

DIALECTS: tuple[Dialect, ...] = (
    Dialect("speccompile", "all of them", f"architecture {OUR_ARCHITECTURE}", _architecture(OUR_ARCHITECTURE), read_ours.read),
    *(
        Dialect(
            f"speculators {kind}", family, f"speculators_model_type {kind}",
            lambda raw, nested, kind=kind: raw.get("speculators_model_type") == kind, reader, (*_CODEBOOKS, *_TAP_NORMS), ("t2d", "verifier_"),
        )
        for kind, (family, reader) in _SPECULATORS.items()
    ),
    Dialect(
        "z-lab DFlash", "dflash", "architecture DFlashDraftModel or MuseGlimmerAssistantModel (SpecForge writes the same)",
        _architecture("DFlashDraftModel", "MuseGlimmerAssistantModel"), read_block.read_zlab, _MUSE,
    ),
    Dialect(
        "z-lab DFlash 2", "dflash2", "architecture DFlash2DraftModel, DFlash2BeamDraftModel or MiniMaxDFlash2DraftModel, or conv_kernel_size",
        _either(
            _architecture("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"),
            _any_key("conv_kernel_size", "selector_rank"),
        ),
        read_block.read_dflash2, _CODEBOOKS,
    ),
    Dialect(
        "JetSpec", "jetspec", "a causal_head key, or jetspec_config", _any_key("causal_head", "jetspec_config"), read_block.read_jetspec,
    ),
    Dialect(
        "SpecForge Domino", "domino", "projector_type domino (or causal_v5), or architecture DominoDraftModel",
        _either(_projector("domino", "causal_v5"), _architecture("DominoDraftModel")), read_block.read_domino, _EARLY_HEADS,
    ),
    Dialect(
        "SpecForge DSpark", "dspark", "projector_type dspark, or architecture DSparkDraftModel",
        _either(_projector("dspark"), _architecture("DSparkDraftModel")), read_block.read_specforge_dspark, (("logit_head.", ""),),
    ),
    Dialect(
        "DeepSpec", "dspark, dflash (markov_rank 0)", "architecture Qwen3DSparkModel", _architecture("Qwen3DSparkModel"), read_block.read_deepspec,
    ),
    Dialect(
        "EAGLE-3", "eagle3", "architecture LlamaForCausalLMEagle3, LlamaForCausalLMEagle or Eagle3…, or eagle_config",
        _either(
            lambda raw, nested: "eagle3" in _first_architecture(raw).lower(), _any_key("eagle_config"),
        ),
        read_chain.read_eagle3,
        (("midlayer.", "layers.0."), *_TAP_NORMS), ("t2d",),
    ),
)  # fmt: skip

# Recognised and refused: each with what is missing here.
_REFUSED: tuple[tuple[Callable[[dict, dict], bool], str], ...] = (
    (lambda raw, nested: raw.get("speculators_model_type") == "peagle", "a P-EAGLE draft; its parallel rows over EAGLE layers are not built"),
    (lambda raw, nested: raw.get("speculators_model_type") == "mtp", "an MTP head; it reads the target's last hidden state, which is no tap"),
    (_any_key("target_num_hidden_layers", "layer_fusion_weights"), "a DFly draft (AngelSlim); its per-layer fusion of taps is not built"),
    (_any_key("lilicorr_heads", "lilicorr_layers", "lilicorr_hidden_size"), "a LiLiCorr draft; its lattice attention is not built"),
    (_any_key("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids"),
     "a target that bundles its draft (dspark_* keys); give the draft's own checkpoint"),
    (_any_key("has_embed_tokens"), "a Nemotron 3.5 draft, quantised to NVFP4; give an unquantised draft"),
    (_architecture("Gemma4DSparkModel", "LingDSparkModel"), "a DeepSpec draft of Gemma- or Ling-shaped layers; only Qwen3-shaped layers are built"),
    (_architecture("LagunaDFlashModel", "LagunaDFlashDraftModel"), "a Laguna draft; its gated attention is not built"),
)  # fmt: skip


def recognise(raw: dict[str, Any], source: Path) -> Dialect:
    """The one dialect of a config.json. Raises UserError for none, for several, and for those known and not supported."""
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise UserError(f"{source}: dflash_config is a {type(nested).__name__}; an object was expected.")
    for claims, what in _REFUSED:
        if claims(raw, nested):
            raise UserError(f"{source} describes {what}. `speccompile drafts` lists what is supported.")
    if raw.get("quantization_config"):
        raise UserError(
            f"{source} has a quantization_config: the draft is quantised; give the unquantised checkpoint."
        )
    found = [d for d in DIALECTS if d.claims(raw, nested)]
    # What only one writer can have written decides: both reuse others' architectures or keys.
    if raw.get("speculators_model_type") is not None:
        found = [d for d in found if d.name.startswith("speculators")]
    elif _first_architecture(raw) == OUR_ARCHITECTURE:
        found = [d for d in found if d.name == "speccompile"]
    # JetSpec, Domino, DSpark and DFlash 2 are written on top of DFlash's form, and may keep its architecture's name.
    if len(found) > 1:
        found = [d for d in found if d.name != "z-lab DFlash"]
    if len(found) == 1:
        return found[0]
    what = f"architectures {raw.get('architectures')}"
    if raw.get("speculators_model_type") is not None:
        what = f"speculators_model_type {raw['speculators_model_type']!r}"
    if not found:
        raise UserError(
            f"{source} has {what}, which is no draft this version knows; `speccompile drafts` lists what is supported."
        )
    both = " and as ".join(f"{d.name} ({d.recognised_by})" for d in found)
    raise UserError(f"{source} is ambiguous: it reads as {both}; remove the keys that do not belong to it.")


def read_draft_config(
    raw: dict[str, Any], source: Path, tensors: set[str], target_layers: int | None = None
) -> DraftConfig:
    """Resolve a draft's config.json.

    Args:
        tensors: the names of the checkpoint's tensors, as the module has them: which tables a draft brings along is
            decided by its tensors.
        target_layers: the target's layer count, for formats that count taps from its end.
    """
    dialect = recognise(raw, source)
    config = dialect.read(raw, source, target_layers)
    own = {"own_embedding": "embed_tokens.weight" in tensors, "own_head": "lm_head.weight" in tensors}
    if dialect.name == "speccompile":
        for name, present in own.items():
            if getattr(config, name) != present:
                raise UserError(
                    f"{source}: {name} is {getattr(config, name)}, but the tensor is {'there' if present else 'not there'}; the checkpoint contradicts itself."
                )
    config = replace(config, dialect=dialect.name, **own)
    check_config(config, source)
    return config
