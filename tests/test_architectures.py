"""Every architecture goes through the same code and gives Transformers' own greedy tokens."""

import pytest
import tiny
from builder import eager_greedy

PROMPTS = [[5, 7, 9], [1], [3, 60, 11, 4] * 5]


@pytest.mark.parametrize("family", ["dflash", "causal-depth"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_greedy_output_is_the_targets_own(pairs, architecture, family):
    pair = pairs(architecture, draft={"family": family})
    for prompt in PROMPTS:
        expected = eager_greedy(pair.target, prompt, 24)
        assert pair.engine.generate([prompt], 24)[0].token_ids == expected
        assert pair.engine.generate([prompt], 24, speculation=False)[0].token_ids == expected


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_attention_layer_takes_the_fused_form(pairs, architecture):
    matches = {p["name"]: p["matches"] for p in pairs(architecture, draft={"family": "dflash"}).report["passes"]["rank0.onnx"]}
    assert matches["lower_group_query_attention"] == tiny.SIZES["num_hidden_layers"] + 2


def test_a_target_longer_than_its_sliding_window(pairs):
    pair = pairs("mistral", draft={"family": "dflash"})
    prompt = list(range(40))
    assert pair.target.config.sliding_window < len(prompt)
    assert pair.engine.generate([prompt], 20)[0].token_ids == eager_greedy(pair.target, prompt, 20)
