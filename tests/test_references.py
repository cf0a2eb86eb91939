"""Proposals equal the reference implementations', step by step, for every family and dialect.

Each seed draws a shape, saves a checkpoint with the reference's own class (`references.py`), builds an engine from it,
and compares every step's proposals, the confidences, the accepted lengths and the text.
"""

import importlib.util
import os

import pytest
import references
import torch
from builder import eager_greedy
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from speccompile.compiler.build import BuildOptions, build
from speccompile.runtime import Engine

# Every family (DFlash with JetSpec, its causal form; DFlash 2; Domino; DSpark; xPress; EAGLE-3) sees at least 20 seeds,
# divided among its dialects; SPECCOMPILE_TEST_SEEDS asks for as many of each dialect.
SEEDS = {
    "z-lab DFlash": 4,
    "SpecForge DFlash": 4,
    "speculators dflash": 4,
    "JetSpec": 8,
    "z-lab DFlash 2": 12,
    "speculators dflash2": 8,
    "SpecForge Domino": 20,
    "SpecForge DSpark": 8,
    "DeepSpec": 4,
    "speculators dspark": 8,
    "speculators xpress": 20,
    "EAGLE-3": 10,
    "speculators eagle3": 10,
}
PROMPTS = ([3], [1, 2, 7, 3, 3], [0, 4, 1, 3, 2, 3, 6] * 3)  # shorter than any window, and longer
TOKENS = 14

for package in ("dflash", "specforge", "speculators"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see tests/run.sh", allow_module_level=True)


@torch.no_grad()
def check_seed(family: str, seed: int, path) -> tuple[int, int]:
    """Steps compared and proposals accepted."""
    reference = references.FAMILIES[family](seed)
    target_path = references.save_target(path / "target", reference.shape, seed)
    reference.save(path / "draft", target_path)
    width = reference.width
    options = BuildOptions(
        str(target_path), str(path / "draft"), path / "engine", max_seq_len=64, block_width=width
    )
    report = build(options)
    assert report["draft"]["block_width"] == width or report["draft"]["backbone"] == "chain"
    target = AutoModelForCausalLM.from_pretrained(target_path, attn_implementation="eager").eval()
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    engine = Engine.load(path / "engine", threads=1)
    steps = hits = 0
    proposed = set()
    for prompt in PROMPTS:
        result = engine.generate([prompt], TOKENS, prefill_chunk=5)[0]
        where = f"{family}, seed {seed}, prompt of {len(prompt)}, width {width}"
        assert result.token_ids == eager_greedy(target, prompt, TOKENS), where
        text, at = [*prompt, *result.token_ids], len(prompt)
        for step, (proposals, used) in enumerate(
            zip(result.proposals, result.acceptance_lengths, strict=True)
        ):
            states = target(
                torch.tensor([text[:at]]), cache=DynamicCache(config=target.config), output_hidden_states=True
            ).hidden_states
            expected = reference.propose(states, text[:at], text[at], embedding, head)
            assert proposals == expected, f"{where}, step {step}"
            proposed |= set(proposals)
            if getattr(reference, "confidence", None) is not None:
                assert result.confidences[step] == pytest.approx(reference.confidence, abs=1e-4), (
                    f"{where}, step {step}"
                )
            left = TOKENS - (at - len(prompt)) - 1
            agreed = next(
                (r for r, (p, t) in enumerate(zip(expected, text[at + 1 :])) if p != t), len(expected)
            )
            assert used == min(agreed + 1, left), f"{where}, step {step}"
            at, steps, hits = at + used, steps + 1, hits + used - 1
    assert len(proposed) > 1, f"{family}, seed {seed}: the same token throughout shows nothing"
    return steps, hits


@pytest.mark.parametrize("family", SEEDS)
def test_proposals_equal_the_reference(tmp_path, family):
    steps = hits = 0
    seeds = int(os.environ.get("SPECCOMPILE_TEST_SEEDS", SEEDS[family]))
    for seed in range(seeds):
        new_steps, new_hits = check_seed(family, seed, tmp_path / str(seed))
        steps, hits = steps + new_steps, hits + new_hits
    assert steps > 10 * seeds
    assert hits > 0  # acceptance of every kind did occur
