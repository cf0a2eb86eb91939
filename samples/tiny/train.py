"""How the tiny pair's drafts learn: the losses of block drafts and of EAGLE-3's chain over the target's own text.

All families get the same budget: sequences, steps, batch and seed. The losses differ as their methods do: a block
draft is trained on sampled blocks, K-1 rows each; a chain on all rows, unrolled K-1 times over its own features.
"""

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from speccompile.compiler.drafts.block import BlockDraft
from speccompile.compiler.drafts.chain import ChainDraft
from speccompile.compiler.drafts.config import DraftConfig
from speccompile.compiler.drafts.loading import empty_draft, save_draft
from speccompile.compiler.drafts.parts import Draft

FAMILIES = ("eagle3", "dflash", "causal-depth")
WIDTH, PROMPT = 8, 32
BATCH, BLOCKS = 32, 10
"""Sequences of a step, and blocks taken from each."""


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over a twentieth of the steps, then a cosine to a twentieth of the rate."""
    warm = max(1, steps // 20)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, 0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, s / steps))))
    )


def progress(what: str, step: int, steps: int, loss: float, start: float) -> None:
    if step % 50 == 0 or step == steps - 1:
        print(f"{what}: step {step + 1}/{steps}, loss {loss:.3f}, {time.time() - start:.0f} s", flush=True)


def draft_config(target: LlamaConfig, mask: int, family: str) -> DraftConfig:
    """Two layers for a block draft, one for the chain, as each is published; the target's embedding and head for all."""
    block = DraftConfig(
        hidden_size=target.hidden_size, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=384, vocab_size=target.vocab_size, num_target_layers=target.num_hidden_layers,
        tapped_hidden_states=(1, 2, 3), mask_token_id=mask, block_width=WIDTH, causal=(family == "causal-depth",) * 2, windows=(None,) * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=1024,
        depth_mixing="shift" if family == "causal-depth" else "none",
    )  # fmt: skip
    if family != "eagle3":
        return block
    one = dict(num_hidden_layers=1, causal=(True,), windows=(None,))
    return replace(block, backbone="chain", mask_token_id=None, qk_norm=False, **one)


def block_logits(
    draft: BlockDraft, features: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """features [N, S, taps*H], tokens [N, S], anchors [N, A] positions -> logits [N*A, K-1, V] of the blocks' proposals.

    A block at anchor n sees the features of positions < n and its own rows.
    """
    count, length = tokens.shape
    blocks = anchors.shape[1]
    context = draft.inject(features, torch.arange(length).expand(count, -1))
    before = (torch.arange(length) < anchors[:, :, None]).flatten(0, 1)[:, None, None, :]  # [N*A, 1, 1, S]

    def attend(layer, q, k, v, sinks):
        rows = q.shape[2]
        own = torch.ones(rows, rows, dtype=torch.bool)
        own = own.tril() if draft.config.causal[layer] else own
        mask = torch.cat([before.expand(-1, 1, rows, -1), own.expand(len(q), 1, -1, -1)], dim=-1)
        keys, values = (
            torch.cat([c.repeat_interleave(blocks, 0), own_rows], 2)
            for c, own_rows in zip(context[layer], (k, v))
        )
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

    anchor = tokens.gather(1, anchors).flatten()
    positions = anchors.flatten()[:, None] + torch.arange(WIDTH)
    return draft.logits(draft.block_hidden(anchor, positions, attend)[:, 1:])


def chain_logits(
    draft: ChainDraft, features: torch.Tensor, tokens: torch.Tensor, unroll: int
) -> torch.Tensor:
    """features [N, S, taps*H], tokens [N, S] -> logits [U, N, S, V]: EAGLE-3's training-time test.

    In unroll u, row t predicts token t+2 from the true features of rows up to t-u and its own of the u rows after.
    """
    count, length = tokens.shape
    positions = torch.arange(length).expand(count, -1)
    following = tokens.roll(-1, dims=1)  # the last row has no token after it, and no label either
    feature, logits = draft.project(features), []
    row, column = torch.arange(length)[:, None], torch.arange(length)[None, :]
    past: list[list] = [[] for _ in draft.layers]
    for step in range(unroll):
        seen = [column <= row - step] + [column == row - step + i for i in range(1, step + 1)]
        mask = torch.cat(seen, dim=1)

        def attend(layer, q, k, v, sinks, mask=mask):
            past[layer].append((k, v))
            keys, values = (torch.cat(rows, 2) for rows in zip(*past[layer]))
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

        hidden = draft.hidden(feature, following, positions, attend)
        logits.append(draft.logits(draft.norm(hidden)))
        feature = F.pad(hidden[:, :-1], (0, 0, 1, 0))
    return torch.stack(logits)


def block_loss(draft: BlockDraft, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy [K-1] of every row of random blocks."""
    anchors = torch.randint(PROMPT, tokens.shape[1] - WIDTH, (len(tokens), BLOCKS))
    labels = tokens.gather(1, (anchors[:, :, None] + torch.arange(1, WIDTH)).flatten(1)).view(-1, WIDTH - 1)
    logits = block_logits(draft, features, tokens, anchors)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels).mean(0)


def chain_loss(draft: ChainDraft, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy [K-1] of every unrolled step over all rows of the target's own text."""
    logits = chain_logits(draft, features, tokens, WIDTH - 1)[:, :, PROMPT:-2]
    labels = tokens[:, PROMPT + 2 :].expand(WIDTH - 1, -1, -1)
    losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
    return losses.view(WIDTH - 1, -1).mean(1)


def train_draft(
    target: LlamaForCausalLM, sequences: torch.Tensor, family: str, mask: int, steps: int, seed: int
) -> Draft:
    torch.manual_seed(seed)
    draft = empty_draft(draft_config(target.config, mask, family))
    draft.lend(target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    trained = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.01, betas=(0.9, 0.95))
    rate, start = schedule(optimizer, steps), time.time()
    weight = torch.exp(-torch.arange(WIDTH - 1) / 4.0)  # later proposals need the first ones accepted
    loss_of = chain_loss if family == "eagle3" else block_loss
    for step in range(steps):
        tokens = sequences[torch.randint(0, len(sequences), (BATCH,))]
        with torch.no_grad():
            hidden = target.model(tokens, output_hidden_states=True).hidden_states
        features = torch.cat([hidden[i] for i in draft.config.tapped_hidden_states], -1)
        loss = (loss_of(draft, features, tokens) * weight).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        progress(family, step, steps, loss.item(), start)
    return draft


def save(draft: Draft, out: Path) -> None:
    """bfloat16 weights; DFlash in z-lab's format, EAGLE-3 in SGLang's, causal-depth in ours."""
    out.mkdir(parents=True, exist_ok=True)
    save_draft(draft, out)
    config, state = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    if draft.config.family == "dflash":
        config = zlab_form(config)
    elif draft.config.family == "eagle3":
        config = eagle3_form(config)
        state = {name.replace("layers.0.", "midlayer."): value for name, value in state.items()}
    state = {name: value.to(torch.bfloat16) for name, value in state.items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


_LAYERS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings", "rope_parameters", "rms_norm_eps", "hidden_act", "attention_bias",
)  # fmt: skip


def zlab_form(config: dict) -> dict:
    taps = [i - 1 for i in config["tapped_hidden_states"]]  # decoder layers, counted from 0
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **{key: config[key] for key in _LAYERS},
        "num_target_layers": config["num_target_layers"],
        "block_size": config["block_width"],
        "dflash_config": {"mask_token_id": config["mask_token_id"], "target_layer_ids": taps},
    }


def eagle3_form(config: dict) -> dict:
    taps = [i - 1 for i in config["tapped_hidden_states"]]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: config[key] for key in _LAYERS},
        "draft_vocab_size": config["vocab_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": taps, "use_aux_hidden_state": True},
    }
