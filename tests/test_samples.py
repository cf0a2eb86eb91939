"""The trained tiny pair that ships with the repository, and a real model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from speccompile.compiler.build import BuildOptions, build
from speccompile.compiler.drafts.loading import load_draft, resolve_draft
from speccompile.compiler.verify import load_original_target, verify
from speccompile.runtime import Engine
from speccompile.runtime.tokenizer import chat_ids, load_tokenizer

TINY = Path(__file__).parent.parent / "samples" / "tiny"
PROMPTS = (  # written for this test: in the manner of the text the pair was trained on, but not from it
    'The "while" statement is used for repeated execution as long as',
    "A class definition is an executable statement that",
    "When a generator function is called, it returns",
    "The following methods can be defined to customize",
)


FAMILIES = ("eagle3", "dflash", "causal-depth")


def sample(script, *arguments):
    """Run a script of samples/tiny as its users do."""
    command = [sys.executable, str(TINY / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tiny_pair_speculates_well(tmp_path, family):
    build(BuildOptions(str(TINY / "target"), str(TINY / family), tmp_path / "engine", max_seq_len=256))
    engine = Engine.load(tmp_path / "engine", threads=1)
    tokenizer = load_tokenizer(engine.directory)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    outcome = verify(engine, load_original_target(engine), prompts, 64)
    assert not outcome.failures
    lengths = outcome.acceptance_lengths
    assert sum(lengths) / len(lengths) > 2.0
    assert chat_ids(tokenizer, [{"role": "user", "content": "hello"}])


def test_the_comparison_is_what_the_readme_says():
    assert sum(f.stat().st_size for f in TINY.rglob("*") if f.is_file()) < 8e6
    assert (TINY / "comparison" / "comparison.md").read_text() in (
        TINY.parent.parent / "README.md"
    ).read_text()


@pytest.mark.parametrize("family", ["eagle3", "causal-depth"])
def test_a_draft_is_served_as_it_was_trained(tmp_path, family):
    """The losses' logits on the target's own text name the engine's proposals, as far as those were accepted."""
    sys.path.insert(0, str(TINY))
    import train

    build(BuildOptions(str(TINY / "target"), str(TINY / family), tmp_path / "engine", max_seq_len=256))
    engine = Engine.load(tmp_path / "engine", threads=1)
    prompt = load_tokenizer(engine.directory).encode(PROMPTS[0])
    result = engine.generate([prompt], 100)[0]
    target = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
    draft = load_draft(TINY / family, resolve_draft(TINY / family, target.config), "float32")
    draft.lend(target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    tokens = torch.tensor([[*prompt, *result.token_ids]])
    anchors = len(prompt) + torch.tensor([0, *result.acceptance_lengths]).cumsum(0)
    anchors = anchors[anchors + train.WIDTH <= tokens.shape[1]]
    with torch.no_grad():
        states = target.model(tokens, output_hidden_states=True).hidden_states
        features = torch.cat([states[i] for i in draft.config.tapped_hidden_states], -1)
        if family == "eagle3":
            unroll = torch.arange(train.WIDTH - 1)
            logits = train.chain_logits(draft, features, tokens, train.WIDTH - 1)[:, 0]
            named = logits[unroll, anchors[:, None] - 1 + unroll].argmax(-1)
        else:
            named = train.block_logits(draft, features, tokens, anchors[None]).argmax(-1)
    assert len(named) > 5
    for row, proposals, used in zip(named.tolist(), result.proposals, result.acceptance_lengths):
        right = (
            used if family == "eagle3" else len(row)
        )  # a chain goes on from its own token, training from the text's
        assert row[:right] == proposals[:right]


def test_drafts_can_be_trained_and_compared(tmp_path):
    shutil.copytree(TINY / "target", tmp_path / "target")
    sample("make.py", "--out", tmp_path, "--keep-target", "--draft-steps", 2, "--sequences", 8)
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["dflash"]["parameters"] > record["eagle3"]["parameters"] > 0
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPTS[0] + "\n")
    drafts = [f"--draft={family}={tmp_path / family}" for family in FAMILIES]
    more = ["--widths", "8", "--tokens", 24, "--repeats", 3, "--prompts", prompts, *drafts]
    printed = sample("compare.py", "--out", tmp_path / "out", "--target", tmp_path / "target", *more)
    results = json.loads((tmp_path / "out" / "comparison.json").read_text())
    for family in FAMILIES:
        measured = results["drafts"][family]
        assert 0 < measured["times"]["8"]["draft_s"] < measured["times"]["8"]["step_s"]
        assert measured["family"] == family and measured["steps"] > 0
    assert (tmp_path / "out" / "comparison.md").read_text() in printed
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_real_model(tmp_path, smollm2):
    from speccompile.compiler import checkpoint
    from speccompile.compiler.drafts.loading import save_draft
    from speccompile.compiler.init_draft import random_draft

    draft = tmp_path / "draft"
    draft.mkdir()
    save_draft(random_draft(checkpoint.target_config(smollm2), "causal-depth", 2, 8, None, 0), draft)
    report = build(BuildOptions(str(smollm2), str(draft), tmp_path / "engine", max_seq_len=512))
    own = (smollm2 / "model.safetensors").stat().st_size + (draft / "model.safetensors").stat().st_size
    assert report["bytes"]["rank0.weights"] < own * 1.05
    engine = Engine.load(tmp_path / "engine")
    tokenizer = load_tokenizer(engine.directory)
    prompts = [
        chat_ids(tokenizer, [{"role": "user", "content": "What is the capital of France?"}]),
        tokenizer.encode("def add(a, b):"),
    ]
    outcome = verify(engine, load_original_target(engine), prompts, 32)
    assert outcome.tokens > 32 and not outcome.failures
    answer = engine.generate(prompts[:1], 32)[0]
    assert "Paris" in tokenizer.decode(answer.token_ids)
