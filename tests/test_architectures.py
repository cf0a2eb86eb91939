"""Every architecture goes through the same code and gives Transformers' own greedy tokens."""

import pytest
import tiny
from builder import eager_greedy

from speccompile.export.errors import UserError

PROMPTS = [[5, 7, 9], [1], [3, 60, 11, 4] * 5]


# A draft never sees the architecture, only its hidden states: the two families take turns.
FAMILY = {a: ("dflash", "causal-depth")[i % 2] for i, a in enumerate(tiny.ARCHITECTURES)}


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_an_architecture_gives_the_targets_own_text(pairs, architecture):
    """Greedy text, with and without speculation, and every attention in the fused form."""
    pair = pairs(architecture, draft={"family": FAMILY[architecture]})
    matches = {p["name"]: p["matches"] for p in pair.report["passes"]["rank0.onnx"]}
    assert matches["lower_group_query_attention"] == tiny.SIZES["num_hidden_layers"] + 2
    for prompt in PROMPTS:
        expected = eager_greedy(pair.target, prompt, 24)
        assert pair.engine.generate([prompt], 24)[0].token_ids == expected
        assert pair.engine.generate([prompt], 24, speculation=False)[0].token_ids == expected


def test_a_target_longer_than_its_sliding_window(pairs):
    pair = pairs("mistral", draft={"family": "dflash"})
    prompt = list(range(40))
    assert pair.target.config.sliding_window < len(prompt)
    assert pair.engine.generate([prompt], 20)[0].token_ids == eager_greedy(pair.target, prompt, 20)


ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_embeddings_of_every_kind(pairs, rope):
    pair = pairs(
        target={"rope_parameters": {"rope_theta": 10000.0, **ROPES[rope]}}, draft={"family": "dflash"}
    )
    prompt = [3, 60, 11, 4] * 9
    assert pair.engine.generate([prompt], 24)[0].token_ids == eager_greedy(pair.target, prompt, 24)


def test_a_rotary_embedding_that_would_change_within_the_engine_is_refused(pairs):
    with pytest.raises(UserError, match="--max-seq-len 128 or less"):
        pairs(target={"rope_parameters": {"rope_theta": 10000.0, **ROPES["longrope"]}}, max_seq_len=200)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("lfm2", {"layer_types": ["conv", "full_attention"] * 2}), ("qwen3_next", {}), ("mamba", {})],
)
def test_targets_with_recurrent_layers_are_refused(pairs, architecture, options):
    with pytest.raises(UserError, match="layer"):
        pairs(architecture, target=options, draft={"family": "dflash"})


@pytest.mark.parametrize("architecture", ["falcon", "bloom", "mpt"])
def test_targets_that_attend_with_code_of_their_own_are_refused(pairs, architecture):
    with pytest.raises(UserError, match="attends with code of its own|a mask|of its own"):
        pairs(architecture, draft={"family": "dflash"})


def test_chunked_attention_is_refused(pairs):
    with pytest.raises(UserError, match="chunked_attention"):
        pairs("llama4_text", target={"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48})


def test_a_trace_that_computes_something_else_is_refused(pairs, monkeypatch):
    """The last line of defence: whatever went wrong in tracing, the logits tell."""
    from speccompile.compiler import tracing

    original = tracing.block_attention
    monkeypatch.setattr(
        tracing, "block_attention", lambda *a, scale, **k: original(*a, scale=scale * 1.1, **k)
    )
    with pytest.raises(UserError, match="disagrees with Transformers' eager mode"):
        pairs(draft={"family": "dflash"}, max_seq_len=96)
