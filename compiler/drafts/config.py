"""What a draft checkpoint says, in one internal form, whatever dialect it was written in.

Every reader of `dialects.py` fills this form; everything after it (loading, tracing, the step, the report) reads
nothing else. Our own dialect is this form as JSON.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import Qwen3Config

OUR_ARCHITECTURE = "SpeccompileDraft"

BACKBONES = ("block", "chain")
LAYOUTS = ("in_place", "anchor_first", "anchor_first_full")
MIXINGS = ("none", "shift", "convolution")
HEADS = ("independent", "markov", "markov_gated", "markov_rnn", "gru", "selector", "jacobi")
TAP_NORMS = ("none", "each", "concatenated")
CONFIDENCES = ("none", "hidden", "hidden_and_previous")


@dataclass(frozen=True)
class DraftConfig:
    """A resolved draft. `K` is the width of one verify block: an anchor and K-1 proposals."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """The target's vocabulary, as the draft states it."""
    num_target_layers: int
    tapped_hidden_states: tuple[int, ...]
    """Indices into Hugging Face's `hidden_states`: 0 is the embedding's output, i the output of decoder layer i-1."""
    block_width: int
    """K the draft was trained for (a chain has no such width; it is what its checkpoint proposes, or 8)."""
    causal: tuple[bool, ...]
    """Per layer: whether a block row sees only the rows before it."""
    windows: tuple[int | None, ...]
    """Per layer: sliding window in tokens, the row itself included, or None."""
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    mask_token_id: int | None = None
    """The token in the rows to fill. A chain has none."""
    backbone: str = "block"
    """`block`: all rows in one pass over injected context (DFlash and its kin); `chain`: one row a pass (EAGLE-3)."""
    layout: str = "in_place"
    """Which rows a block runs, and which position each predicts: `in_place`, K rows, row r its own position n+r and row
    0 nothing; `anchor_first`, K-1 rows, row r position n+r+1; `anchor_first_full`, likewise with an unused row K-1."""
    draft_vocab_size: int | None = None
    """Rows of a reduced output head, mapped to the target's tokens by `d2t`. None: the whole vocabulary."""
    target_hidden_size: int | None = None
    """Width of a tapped hidden state. None: `hidden_size`."""
    own_embedding: bool = False
    own_head: bool = False
    """Whether the checkpoint brings `embed_tokens` and `lm_head` of its own; otherwise they are the target's."""
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    qk_norm: bool = True
    """Per-head RMSNorm of queries and keys (Qwen3); Llama-shaped chains have none."""
    rope_interleaved: bool = False
    """RoPE turns neighbouring pairs instead of halves."""
    attention_sinks: bool = False
    """A learned logit per head that joins every softmax's denominator."""
    attention_value_scale: float = 1.0
    tap_norms: str = "none"
    """RMSNorm before `fc`: of `each` tapped state, or of their concatenation (`concatenated`)."""
    depth_mixing: str = "none"
    """How rows speak inside the depth: `shift`, x_r += W·RMSNorm(x_{r-1}) before every layer; `convolution`, DFlash 2's
    grouped dynamic convolution around every sub-layer."""
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    head: str = "independent"
    """What corrects a row's logits by the token before: nothing, DSpark's Markov heads, Domino's GRU, DFlash 2's
    candidate selector, xPress's parallel (Jacobi) refiner."""
    head_rank: int | None = None
    """Width of the head's latent vector."""
    head_candidates: int | None = None
    """A serial head scores only so many of a row's best tokens; None scores the whole vocabulary."""
    head_state_size: int | None = None
    """Width of the GRU's state."""
    head_prefix: int = 0
    """So many first proposals stay uncorrected (Domino's `pure_draft_prefix_len`)."""
    head_mlp_ratio: int | None = None
    head_passes: int | None = None
    """xPress: width of its MLP over the rank, and its refinement passes."""
    confidence: str = "none"
    """The acceptance predictor: of the row's `hidden` state, or also of the token before (`hidden_and_previous`)."""
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    fc_bias: bool = False
    norm_before_residual: bool = False
    """Chain: the residual starts from the normed feature."""
    feeds_normed: bool = False
    """Chain: the next row's feature is the hidden state after the last norm instead of before it."""
    dialect: str = field(default="speccompile", compare=False)
    """The dialect it was read from."""

    @property
    def family(self) -> str:
        """The published name of what these knobs make."""
        if self.backbone == "chain":
            return "eagle3"
        by_head = {"gru": "domino", "jacobi": "xpress", "selector": "dflash2"}
        if self.head in by_head:
            return by_head[self.head]
        if self.head.startswith("markov"):
            return "dspark"
        if self.depth_mixing != "none":
            return "dflash2" if self.depth_mixing == "convolution" else "causal-depth"
        return "jetspec" if all(self.causal) and not any(self.windows) else "dflash"

    @property
    def feature_size(self) -> int:
        """Width of the concatenated tapped hidden states."""
        return len(self.tapped_hidden_states) * (self.target_hidden_size or self.hidden_size)

    @property
    def head_rows(self) -> int:
        return self.draft_vocab_size or self.vocab_size

    @property
    def first_row(self) -> int:
        """The block row that predicts the first proposal."""
        return 1 if self.layout == "in_place" else 0

    def rows(self, width: int) -> int:
        """Rows the draft runs for a verify block of `width` rows."""
        return width - 1 if self.layout == "anchor_first" else width

    def rotary(self) -> Qwen3Config:
        """The Transformers config from which the rotary embedding is built (default, linear, yarn, …)."""
        return Qwen3Config(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            rope_parameters=dict(self.rope_parameters),
            max_position_embeddings=self.max_position_embeddings,
        )

    def to_json(self) -> dict[str, Any]:
        """The flat form of our own dialect."""
        values = {k: v for k, v in asdict(self).items() if k != "dialect"}
        return {"architectures": [OUR_ARCHITECTURE], "model_type": "speccompile_draft", **values}

    def describe(self) -> dict[str, str]:
        """What was resolved, as label and text, for `build` and `inspect`."""
        kinds = {True: "causal", False: "bidirectional"}
        causal = [kinds[c] for c in self.causal]
        mixing = self.depth_mixing
        if mixing == "convolution":
            mixing += f", {self.conv_kernel_size} taps, groups of {self.conv_group_size}"
        head = self.head
        if self.head_rank:
            head += f", rank {self.head_rank}"
        if self.head != "independent":
            head += (
                f", {self.head_candidates} candidates a row" if self.head_candidates else ", whole vocabulary"
            )
        if self.head_prefix:
            head += f", first {self.head_prefix} uncorrected"
        vocabulary = f"{self.vocab_size}"
        if self.draft_vocab_size:
            vocabulary = f"{self.draft_vocab_size} of the target's {self.vocab_size} tokens, mapped by d2t"
        tables = {True: "the draft's own", False: "the target's"}
        lines = {
            "family": f"{self.family}, read as {self.dialect}",
            "sizes": f"{self.num_hidden_layers} layers, hidden {self.hidden_size}, {self.num_attention_heads} heads over "
            f"{self.num_key_value_heads} of {self.head_dim}, MLP {self.intermediate_size}",
            "taps": f"hidden_states {list(self.tapped_hidden_states)} of a {self.num_target_layers}-layer target, in this order",
            "trained width": f"{self.block_width}, {self.layout.replace('_', ' ')}"
            if self.backbone == "block"
            else "a chain, any width",
            "in the block": causal[0] if len(set(causal)) == 1 else ", ".join(causal),
            "windows": "none" if not any(self.windows) else ", ".join(str(w or "full") for w in self.windows),
            "depth mixing": mixing,
            "head": f"{head}; confidence {self.confidence.replace('_', ' ')}",
            "vocabulary": vocabulary,
            "tables": f"embedding {tables[self.own_embedding]}, output head {tables[self.own_head]}",
            "RoPE": f"{self.rope_parameters}{', interleaved' if self.rope_interleaved else ''}",
        }
        if self.mask_token_id is not None:
            lines["mask token"] = str(self.mask_token_id)
        return lines
