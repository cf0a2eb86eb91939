"""The block draft: one parameterised module for the parallel family (DFlash, DFlash 2, JetSpec, DSpark, Domino, xPress)
and for causal-depth drafts.

Backbone (DFlash, arXiv 2602.06036). A context feature per committed token,

    f_t = RMSNorm(W_fc · concat_j tap_j(t)),

is projected into every layer's key/value cache; the block rows [anchor, MASK, …, MASK] attend to it and to each
other in one pass. What differs is in `DraftConfig`: the in-block mask, how rows speak inside the depth, which row
predicts which position, and what corrects the logits.

    shift (causal-depth)     x_r += W · RMSNorm(x_{r-1}) before every layer,   x_{-1} = 0    (W = 0 is plain DFlash)
    convolution (DFlash 2)   around each sub-layer S of the normed rows u: k = W_k u;  y = C(u; b_in + k_in);
                             x += C(S(y); b_out + k_out);   C(z; c)_r = sum_j c_{r,j} * z_{r-j}

Shapes: B sequences, S context rows, K block width, R rows run, H hidden size, D head size.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from speccompile.compiler.drafts import heads
from speccompile.compiler.drafts.config import DraftConfig
from speccompile.compiler.drafts.parts import Attend, Attention, Draft


class DepthShift(nn.Module):
    """x_r += W · RMSNorm(x_{r-1}): the row before speaks to this one. Rows are on axis 1, one block an entry."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.pad(self.proj(self.norm(x[:, :-1])), (0, 0, 1, 0))


class DepthConvolution(nn.Module):
    """DFlash 2's convolution over the block's rows; the coefficients of both sides come from the un-convolved rows."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.taps, self.group = config.conv_kernel_size, config.conv_group_size
        groups = config.hidden_size // self.group
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * groups, bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def coefficients(self, u: torch.Tensor) -> torch.Tensor:
        """[B, R, H] -> [B, R, side, tap, H]"""
        kappa = self.kernel_projection(u).view(*u.shape[:2], 2, self.taps, -1, 1)
        base = self.base_kernel.view(2, self.taps, -1, self.group)
        return (base + kappa).flatten(-2)

    def convolve(self, z: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        """z [B, R, H], one side's coefficients [B, R, tap, H] -> [B, R, H]"""
        out = coefficients[:, :, 0] * z
        for tap in range(1, min(self.taps, z.shape[1])):
            out = out + coefficients[:, :, tap] * F.pad(z[:, :-tap], (0, 0, tap, 0))
        return out


class BlockLayer(nn.Module):
    def __init__(self, config: DraftConfig, index: int):
        super().__init__()
        self.index = index
        self.mixing = config.depth_mixing
        self.self_attn = Attention(config, config.hidden_size)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if self.mixing == "shift":
            self.depth_shift = DepthShift(config)
        elif self.mixing == "convolution":
            self.attention_conv = DepthConvolution(config)
            self.mlp_conv = DepthConvolution(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        def attention(u: torch.Tensor) -> torch.Tensor:
            block = self.self_attn
            out = attend(self.index, block.query(u, cos, sin), *block.key_value(u, cos, sin), block.sinks)
            return block.merge(out)

        if self.mixing != "convolution":
            if self.mixing == "shift":
                x = self.depth_shift(x)
            x = x + attention(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))
        # The residual is float32: in float16 a DFlash 2 draft's first layer overflows (vllm-project/vllm#55250).
        dtype, x = self.mlp.gate_proj.weight.dtype, x.float()
        for norm, mixer, sub_layer in (
            (self.input_layernorm, self.attention_conv, attention),
            (self.post_attention_layernorm, self.mlp_conv, self.mlp),
        ):
            u = norm(x).to(dtype)
            coefficients = mixer.coefficients(u)
            y = sub_layer(mixer.convolve(u, coefficients[:, :, 0]))
            x = x + mixer.convolve(y.float(), coefficients[:, :, 1].float())
        return x


_HEADS = {
    "markov": ("markov_head", heads.MarkovHead),
    "markov_gated": ("markov_head", heads.MarkovHead),
    "markov_rnn": ("markov_head", heads.MarkovHead),
    "gru": ("domino_head", heads.DominoHead),
    "selector": ("candidate_selector", heads.CandidateSelector),
    "jacobi": ("refiner_head", heads.RefinerHead),
}


class BlockDraft(Draft):
    def __init__(self, config: DraftConfig):
        super().__init__(config)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config, i) for i in range(config.num_hidden_layers))
        if config.head != "independent":
            name, kind = _HEADS[config.head]
            self.add_module(name, kind(config))
        if config.confidence != "none":
            self.confidence_head = heads.ConfidenceHead(config)

    def inject(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tapped hidden states [B, S, taps*H_t] at positions [B, S] -> per layer the context rows k, v [B, Hkv, S, D]."""
        context = self.hidden_norm(self.project(features))
        cos, sin = self.rotary_emb(context, positions)
        return [layer.self_attn.key_value(context, cos, sin) for layer in self.layers]

    def block_hidden(self, anchor: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Anchor tokens [B] and positions [B, R] of the block's rows -> hidden states [B, R, H] after the last norm."""
        mask = torch.full_like(positions[:, 1:], self.config.mask_token_id)
        x = self.embed(torch.cat([anchor[:, None], mask], dim=1))
        dtype = x.dtype
        if self.config.input_embedding_scale != 1.0:
            x = x * self.config.input_embedding_scale
        cos, sin = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x).to(dtype)

    def propose(
        self, anchor: torch.Tensor, before: torch.Tensor, positions: torch.Tensor, width: int, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Proposals [B, K-1] after `anchor` [B], and their confidences [B, K-1] where the draft predicts them.

        `before` [B] is the token before the anchor, `positions` [B, R] are the rows'.
        """
        first = self.config.first_row
        hidden = self.block_hidden(anchor, positions, attend)
        rows = hidden[:, first : first + width - 1]
        if self.config.head == "independent":
            proposals = self.token_ids(self.logits(rows).argmax(-1))
        elif self.config.head == "jacobi":
            proposals = self.refiner_head.propose(self, hidden, anchor, before)[:, first : first + width - 1]
        else:
            proposals = getattr(self, _HEADS[self.config.head][0]).propose(self, rows, anchor, before)
        if self.config.confidence == "none":
            return proposals, None
        if self.config.confidence == "hidden_and_previous":
            previous = torch.cat([anchor[:, None], proposals[:, :-1]], dim=1)
            rows = torch.cat([rows, self.markov_head.previous(previous)], dim=-1)
        return proposals, self.confidence_head(rows)
