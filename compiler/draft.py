"""The block draft: one parameterised module for DFlash and causal-depth drafts.

Backbone (DFlash, arXiv 2602.06036). A context feature per committed token,

    f_t = RMSNorm(W_fc · concat_j tap_j(t)),

is projected into every layer's key/value cache; the block rows [anchor, MASK, …, MASK] attend to it and to
each other in one pass, and row r predicts the token at its own position. Causal-depth drafts add order
inside the depth: rows see only rows before them, and each layer first mixes in the row before,

    x_r += W · RMSNorm(x_{r-1}),   x_{-1} = 0        (W = 0 is plain DFlash).

Shapes: B sequences, S context rows, K block rows, H hidden size, D head size.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from speccompile.compiler.draft_config import DraftConfig

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [B, Hq, K, D], k [B, Hkv, K, D], v [B, Hkv, K, D]) -> [B, Hq, K, D]: attention of the block rows over
the context and themselves. The step binds it to the cache, training to a dense mask."""


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE (half-split) on [B, heads, rows, D] with cos and sin [B, rows, D]."""
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


class DraftAttention(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, rows, heads*D] -> [B, rows, heads, D]"""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def key_value(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, rows, H] -> k, v [B, Hkv, rows, D]"""
        k = self.k_norm(self.heads(self.k_proj(x))).transpose(1, 2)
        return rotate(k, cos, sin), self.heads(self.v_proj(x)).transpose(1, 2)


class DepthShift(nn.Module):
    """x_r += W · RMSNorm(x_{r-1}): the row before speaks to this one. Rows are on axis 1, one block an entry."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.pad(self.proj(self.norm(x[:, :-1])), (0, 0, 1, 0))


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig, index: int):
        super().__init__()
        self.index = index
        self.self_attn = DraftAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.depth_mixing == "shift":
            self.depth_shift = DepthShift(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        if hasattr(self, "depth_shift"):
            x = self.depth_shift(x)
        attention = self.self_attn
        u = self.input_layernorm(x)
        q = rotate(attention.q_norm(attention.heads(attention.q_proj(u))).transpose(1, 2), cos, sin)
        k, v = attention.key_value(u, cos, sin)
        out = attend(self.index, q, k, v).transpose(1, 2)
        x = x + attention.o_proj(out.reshape(*x.shape[:-1], -1))
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    """Parameter names are z-lab's. `embedding` and `head` [V, H] are the target's own tables, lent by the build."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config.rotary())
        self.register_parameter("embedding", None)
        self.register_parameter("head", None)

    def lend(self, embedding: nn.Parameter, head: nn.Parameter) -> None:
        """Use the target's embedding table and output head, both [V, H], without copying them."""
        self.embedding, self.head = embedding, head

    def inject(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tapped hidden states [B, S, taps*H] at positions [B, S] -> per layer the context rows k, v [B, Hkv, S, D]."""
        context = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary_emb(context, positions)
        return [layer.self_attn.key_value(context, cos, sin) for layer in self.layers]

    def block_hidden(self, anchor: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Anchor tokens [B] and positions [B, K] of the block's rows -> hidden states [B, K, H] after the last norm."""
        mask = torch.full_like(positions[:, 1:], self.config.mask_token_id)
        x = F.embedding(torch.cat([anchor[:, None], mask], dim=1), self.embedding)
        if self.config.input_embedding_scale != 1.0:
            x = x * self.config.input_embedding_scale
        cos, sin = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, rows, H] -> [B, rows, V], with the draft's own scaling and soft-cap."""
        logits = F.linear(hidden, self.head)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        if cap is not None and cap > 0:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def propose(self, anchor: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Anchor [B], block positions [B, K] -> proposals [B, K-1], the greedy token of every row after the anchor's."""
        return self.logits(self.block_hidden(anchor, positions, attend)[:, 1:]).argmax(-1)
