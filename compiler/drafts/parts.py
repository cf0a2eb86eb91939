"""What block and chain drafts share: features, tables, reduced vocabulary, RoPE."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from speccompile.compiler.drafts.config import DraftConfig

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(layer, q [B, Hq, R, D], k [B, Hkv, R, D], v [B, Hkv, R, D], sinks [Hq] | None) -> [B, Hq, R, D]: attention of new rows
over the cached ones and themselves. The step binds it to the cache, training to a dense mask."""


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """RoPE on [B, heads, rows, D] with cos and sin [B, rows, D]: of halves, or interleaved, of neighbouring pairs."""
    if interleaved:
        half = x.shape[-1] // 2
        cos, sin = (t[..., :half].repeat_interleave(2, dim=-1) for t in (cos, sin))
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    else:
        turned = rotate_half(x)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


class Attention(nn.Module):
    """Projections of one attention sub-layer; `inputs` is the width of its rows."""

    def __init__(self, config: DraftConfig, inputs: int):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        width, kv_width = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(inputs, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(inputs, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(inputs, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        norm = (
            (lambda: Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps))
            if config.qk_norm
            else nn.Identity
        )
        self.q_norm, self.k_norm = norm(), norm()
        if config.attention_sinks:
            self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads))

    @property
    def sinks(self) -> torch.Tensor | None:
        return self.attention_sink_bias if self.config.attention_sinks else None

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, rows, heads*D] -> [B, rows, heads, D]"""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def query(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, rows, inputs] -> [B, Hq, rows, D]"""
        q = self.q_norm(self.heads(self.q_proj(x))).transpose(1, 2)
        return rotate(q, cos, sin, self.config.rope_interleaved)

    def key_value(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, rows, inputs] -> k, v [B, Hkv, rows, D]"""
        k = self.k_norm(self.heads(self.k_proj(x))).transpose(1, 2)
        v = self.heads(self.v_proj(x)).transpose(1, 2)
        if self.config.attention_value_scale != 1.0:
            v = v * self.config.attention_value_scale
        return rotate(k, cos, sin, self.config.rope_interleaved), v

    def merge(self, out: torch.Tensor) -> torch.Tensor:
        """[B, Hq, rows, D] -> [B, rows, H]"""
        out = out.transpose(1, 2)
        return self.o_proj(out.reshape(*out.shape[:2], -1))


class Draft(nn.Module):
    """Parameter names are the published ones. `embedding` and `head` are the draft's own tables where it brings them,
    else the target's, lent by the build."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        tap_size = config.target_hidden_size or size
        if config.tap_norms == "each":
            self.tap_norms = nn.ModuleList(
                Qwen3RMSNorm(tap_size, eps=eps) for _ in config.tapped_hidden_states
            )
        elif config.tap_norms == "concatenated":
            self.tap_norm = Qwen3RMSNorm(config.feature_size, eps=eps)
        self.fc = nn.Linear(config.feature_size, size, bias=config.fc_bias)
        self.norm = Qwen3RMSNorm(size, eps=eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config.rotary())
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if config.own_head:
            self.lm_head = nn.Linear(size, config.head_rows, bias=False)
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_parameter("embedding", None)
        self.register_parameter("head", None)

    def lend(self, embedding: nn.Parameter, head: nn.Parameter) -> None:
        """Offer the target's embedding table and output head, both [V, H]; used, uncopied, where the draft has none."""
        self.embedding = self.embed_tokens.weight if self.config.own_embedding else embedding
        self.head = self.lm_head.weight if self.config.own_head else head

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the raw embedding table."""
        return F.embedding(tokens, self.embedding)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Concatenated tapped hidden states [B, S, taps*H_t] -> [B, S, H], before any norm that follows."""
        if self.config.tap_norms == "each":
            parts = features.chunk(len(self.tap_norms), dim=-1)
            features = torch.cat(
                [norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], dim=-1
            )
        elif self.config.tap_norms == "concatenated":
            features = self.tap_norm(features)
        return self.fc(features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, rows, H] -> [B, rows, V_draft], with the draft's own scaling and soft-cap; rows that only pad the target's
        head beyond the draft's vocabulary are cut off."""
        logits = F.linear(hidden, self.head)
        if logits.shape[-1] > self.config.head_rows:
            logits = logits[..., : self.config.head_rows]
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        if cap is not None and cap > 0:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def token_ids(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the draft's head -> the target's tokens (`d2t` holds offsets)."""
        if self.config.draft_vocab_size is None:
            return index
        return index + self.d2t.index_select(0, index.flatten()).view(index.shape)
