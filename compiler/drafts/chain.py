"""EAGLE-3 (arXiv 2503.01840): the chain, one draft pass a token, unrolled in the step. The yardstick.

The feature g_t = W_fc · concat(taps of t) is paired with the *next* token and predicts the one after. Layer 0 attends
from [RMSNorm(e(x_{t+1})); RMSNorm(g_t)] with a residual that starts from g_t (or from its norm); further layers are
ordinary ones. Once a step,

    extend    rows of all tokens just verified, from the target's taps, replace what the chain had put there;
    first     the last committed row, paired with the new anchor, gives the first proposal and h, its hidden state;
    chain     each further row is fed h and the proposal before, and appends to the cache after the committed rows.

Shapes: B sequences, S rows of the step, K block width, H hidden size. Row t sits at cache row and position t.
"""

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from speccompile.compiler.drafts.config import DraftConfig
from speccompile.compiler.drafts.parts import Attend, Attention, Draft


class ChainLayer(nn.Module):
    def __init__(self, config: DraftConfig, index: int):
        super().__init__()
        self.index = index
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Attention(config, config.hidden_size * (2 if index == 0 else 1))
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if index == 0:
            self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, embedded: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        if self.index == 0:
            normed = self.hidden_norm(x)
            u = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
            x = normed if self.norm_before_residual else x
        else:
            u = self.input_layernorm(x)
        attention = self.self_attn
        out = attend(
            self.index, attention.query(u, cos, sin), *attention.key_value(u, cos, sin), attention.sinks
        )
        x = x + attention.merge(out)
        return x + self.mlp(self.post_attention_layernorm(x))


class ChainDraft(Draft):
    def __init__(self, config: DraftConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(ChainLayer(config, i) for i in range(config.num_hidden_layers))

    def hidden(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Features [B, S, H], the tokens after them [B, S] and positions [B, S] -> hidden states [B, S, H] before the last norm."""
        embedded = self.embed(tokens)
        cos, sin = self.rotary_emb(embedded, positions)
        for layer in self.layers:
            features = layer(features, embedded, cos, sin, attend)
        return features

    def choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One row's hidden state [B, 1, H] -> its proposal [B] and the feature fed to the next row [B, 1, H]."""
        normed = self.norm(hidden)
        token = self.token_ids(self.logits(normed)[:, 0].argmax(-1))
        return token, normed if self.config.feeds_normed else hidden
