"""The engine directory as others read it: TensorRT-LLM's keys against a golden file and readers that mimic its own."""

import json
from pathlib import Path

import pytest
import tiny
from trtllm_readers import read_as_cpp, read_as_python

GOLDEN = Path(__file__).parent / "golden" / "config.json"


def config_of(pair) -> dict:
    return json.loads((pair.engine.directory.path / "config.json").read_text())


def test_the_sections_of_tensorrt_llm_are_the_golden_ones(pairs):
    """A changed key is a changed contract: look at who reads it before you change the golden file."""
    config = config_of(pairs(draft=tiny.FAMILIES["causal-depth"]))
    golden = json.loads(GOLDEN.read_text())
    assert {name: config[name] for name in ("pretrained_config", "build_config")} == golden


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "phi3", "gpt_oss", "cohere2"])
def test_both_readers_take_every_architecture(pairs, architecture):
    pair = pairs(architecture, draft=tiny.FAMILIES["causal-depth"])
    config, text, settings = (
        config_of(pair),
        pair.target.config.get_text_config(),
        pair.engine.directory.settings,
    )
    read = read_as_cpp(config)
    width = settings["block_width"]
    assert read["architecture"] == type(pair.target).__name__
    assert (read["layers"], read["heads"], read["kv_heads"], read["vocab_size"]) == (
        text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads, text.vocab_size,
    )  # fmt: skip
    assert read["head_size"] == settings["caches"]["target.0.key"]["size"]
    assert read["max_draft_len"] == width - 1 == config["build_config"]["max_draft_len"]
    # As trtllm-build leaves them: room for a block past the longest sequence, and every sequence's block in one step.
    assert read["max_seq_len"] == settings["max_seq_len"] + width - 1
    assert read["max_input_len"] == settings["max_seq_len"] and read["max_beam_width"] == 1
    assert read["max_num_tokens"] >= read["max_batch_size"] * width
    assert not read["attention_plugin"] and not read["lora_plugin"]
    assert read_as_python(config)["version"]


@pytest.mark.parametrize("section", ["pretrained_config", "build_config"])
def test_the_readers_miss_what_is_missing(pairs, section):
    """The mimics can fail: every key of the golden file that either insists on is one it does not do without."""
    insisted = {
        "pretrained_config": ["architecture", "dtype", "num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "mapping", "quantization"],
        "build_config": ["plugin_config", "lora_config", "max_input_len", "max_seq_len", "max_batch_size", "max_num_tokens", "opt_num_tokens", "kv_cache_type"],
    }[section]  # fmt: skip
    for name in insisted:
        config = config_of(pairs(draft=tiny.FAMILIES["causal-depth"]))
        del config[section][name]
        with pytest.raises((KeyError, AssertionError)):
            read_as_cpp(config)
            read_as_python(config)
