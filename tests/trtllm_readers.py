"""What TensorRT-LLM's two readers of config.json (versions 0.17 to 1.2) insist on, retold for the tests.

The C++ one is `cpp/tensorrt_llm/runtime/gptJsonConfig.cpp`, the Python one `EngineConfig.from_json_str` of
`tensorrt_llm/builder.py`. A field they insist on is a KeyError here, as it is an exception there.
"""

from typing import Any

EXPLICIT_DRAFT_TOKENS = 16  # SpeculativeDecodingMode, an IntFlag
CACHE_TYPES = ("CONTINUOUS", "PAGED", "DISABLED")


def _or(section: dict[str, Any], name: str, default: Any) -> Any:
    """An absent field has a default; a null one is not caught by the earlier versions."""
    value = section.get(name, default)
    if value is None:
        raise TypeError(f"{name} is null")
    return value


def read_as_cpp(config: dict[str, Any]) -> dict[str, Any]:
    """The model configuration that the C++ runtime would make, as far as an explicit-draft engine has one."""
    if "version" not in config:
        raise KeyError("version")  # it would take the directory for one of before 2024
    pretrained, build = config["pretrained_config"], config["build_config"]
    mapping = pretrained["mapping"]
    heads = pretrained["num_attention_heads"] // (mapping["tp_size"] * _or(mapping, "cp_size", 1))
    hidden = pretrained["hidden_size"] // mapping["tp_size"]
    assert pretrained["dtype"] in ("float32", "float16", "bfloat16")
    assert _or(pretrained, "logits_dtype", "float32") in ("float32", "float16")
    assert _or(build, "kv_cache_type", "").upper() in CACHE_TYPES
    assert isinstance(pretrained["quantization"], dict) and isinstance(build["lora_config"], dict)
    if "GLM" in pretrained["architecture"]:
        pretrained["chatglm_version"]
    plugins = build["plugin_config"]
    for name in ("remove_input_padding", "context_fmha", "use_paged_context_fmha", "paged_kv_cache"):
        assert isinstance(plugins[name], bool), name
    assert isinstance(plugins["tokens_per_block"], int)
    assert not plugins["remove_input_padding"] or build["max_num_tokens"]
    assert build["speculative_decoding_mode"] == EXPLICIT_DRAFT_TOKENS
    return {
        "architecture": pretrained["architecture"],
        "layers": pretrained["num_hidden_layers"],
        "heads": heads,
        "kv_heads": _or(pretrained, "num_key_value_heads", heads),
        "kv_heads_per_layer": _or(pretrained, "num_kv_heads_per_layer", []),
        "head_size": _or(pretrained, "head_size", hidden // heads),
        "vocab_size": pretrained["vocab_size"],
        "intermediate_size": _or(pretrained, "intermediate_size", 0),
        "max_positions": _or(pretrained, "max_position_embeddings", 0),
        "max_batch_size": _or(build, "max_batch_size", 0),
        "max_seq_len": _or(build, "max_seq_len", 0),
        "max_input_len": _or(build, "max_input_len", 0),
        "max_num_tokens": build.get("max_num_tokens"),
        "max_beam_width": _or(build, "max_beam_width", 0),
        "attention_plugin": plugins["gpt_attention_plugin"] is not None,
        "lora_plugin": plugins["lora_plugin"] is not None,
        "max_draft_len": _or(pretrained, "redrafter_num_beams", 0)
        * _or(pretrained, "redrafter_draft_len_per_beam", 0),
    }


def read_as_python(config: dict[str, Any]) -> dict[str, Any]:
    """What the Python reader pops without a default; the rest it takes as keywords, or warns of."""
    pretrained, build = config["pretrained_config"], config["build_config"]
    names = ("architecture", "dtype", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    limits = (
        "max_input_len",
        "max_seq_len",
        "max_batch_size",
        "max_beam_width",
        "max_num_tokens",
        "opt_num_tokens",
    )
    assert build["kv_cache_type"].upper() in CACHE_TYPES
    return {"version": config["version"]} | {n: pretrained[n] for n in names} | {n: build[n] for n in limits}
