"""Causal-depth drafts against an independent statement of their mathematics, row by row.

No reference package has this family, so the check is written from the formulas alone: it shares no code with
`compiler/draft.py`, reads the checkpoint's tensors by name, and loops where the module batches.
"""

import pytest
import torch
from safetensors.torch import load_file
from transformers.cache_utils import DynamicCache


def norm(x, weight, eps=1e-6):
    return weight * x / torch.sqrt((x * x).mean() + eps)


def rope(x, position, theta=10000.0):
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / len(x)))
        out[i] = x[i] * torch.cos(angle) - x[half + i] * torch.sin(angle)
        out[half + i] = x[half + i] * torch.cos(angle) + x[i] * torch.sin(angle)
    return out


def propose_by_hand(w, config, features, anchor, embedding, head):
    """features [n, taps*H] of the committed tokens -> K-1 proposals after `anchor`, which sits at position n."""
    n, size, kv_heads = len(features), config.head_dim, config.num_key_value_heads
    group = config.num_attention_heads // kv_heads
    context = [norm(w["fc.weight"] @ f, w["hidden_norm.weight"]) for f in features]
    rows = [embedding[anchor]] + [embedding[config.mask_token_id]] * (config.block_width - 1)
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        if config.depth_mixing == "shift":
            spoken = [
                w[at + "depth_shift.proj.weight"] @ norm(x, w[at + "depth_shift.norm.weight"]) for x in rows
            ]
            rows = [x + (spoken[r - 1] if r else 0) for r, x in enumerate(rows)]
        inputs = [norm(x, w[at + "input_layernorm.weight"]) for x in rows]
        sources = [*context, *inputs]  # the context does not pass the layer's input norm

        def heads(x, name, count, normed, position, at=at):
            parts = (w[f"{at}self_attn.{name}_proj.weight"] @ x).view(count, size)
            return [
                rope(norm(p, w[f"{at}self_attn.{name}_norm.weight"]), position) if normed else p
                for p in parts
            ]

        keys = [heads(x, "k", kv_heads, True, p) for p, x in enumerate(sources)]
        values = [heads(x, "v", kv_heads, False, p) for p, x in enumerate(sources)]
        after = []
        for r, x in enumerate(rows):
            queries = heads(inputs[r], "q", config.num_attention_heads, True, n + r)
            seen = range(n + r + 1) if config.causal[layer] else range(len(sources))
            out = []
            for h, q in enumerate(queries):
                weights = torch.stack([q @ keys[s][h // group] for s in seen]).div(size**0.5).softmax(0)
                out.append(sum(p * values[s][h // group] for p, s in zip(weights, seen)))
            x = x + w[at + "self_attn.o_proj.weight"] @ torch.cat(out)
            z = norm(x, w[at + "post_attention_layernorm.weight"])
            gate, up = w[at + "mlp.gate_proj.weight"] @ z, w[at + "mlp.up_proj.weight"] @ z
            after.append(x + w[at + "mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up))
        rows = after
    return [int((head @ norm(x, w["norm.weight"])).argmax()) for x in rows[1:]]


@torch.no_grad()
def features_of(pair, tokens):
    """Tapped hidden states [n, taps*H] of `tokens`, from Transformers in eager mode."""
    output = pair.target(
        torch.tensor([tokens]), cache=DynamicCache(config=pair.target.config), output_hidden_states=True
    )
    return torch.cat([output.hidden_states[i][0] for i in pair.draft.config.tapped_hidden_states], -1)


@pytest.mark.parametrize(
    "options", [{}, {"causal": (True, False)}, {"family": "dflash"}, {"layers": 3, "block_width": 6}]
)
def test_proposals_follow_the_formulas(pairs, options):
    pair = pairs(target={"vocab_size": 7}, draft={"family": "causal-depth", **options})
    weights = load_file(pair.draft_path / "model.safetensors")
    tables = pair.target.get_input_embeddings().weight, pair.target.get_output_embeddings().weight
    for prompt in ([3, 1, 2], [6, 0, 5, 5, 1, 2, 4, 3]):
        result = pair.engine.generate([prompt], 24)[0]
        text, at = [*prompt, *result.token_ids], len(prompt)
        for proposals, used in zip(result.proposals, result.acceptance_lengths):
            expected = propose_by_hand(
                weights, pair.draft.config, features_of(pair, text[:at]), text[at], *tables
            )
            assert proposals == expected
            at += used
