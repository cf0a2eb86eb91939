"""config.json of an engine directory: TensorRT-LLM's keys, as its readers up to 1.2 insist on them, and ours.

`speculative_decoding_mode` 16 (explicit draft tokens) with one beam is the shape a chain block fits. The tensors
are our own step contract, so such a reader understands the configuration, not the engine file.
"""

from typing import Any

from transformers import PretrainedConfig

EXPLICIT_DRAFT_TOKENS = 16


def pretrained_config(config: PretrainedConfig, dtype: str, width: int) -> dict[str, Any]:
    text = config.get_text_config()
    heads = text.num_attention_heads
    section = {
        "architecture": (config.architectures or [type(config).__name__.replace("Config", "ForCausalLM")])[0],
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": getattr(text, "intermediate_size", None),
        "num_hidden_layers": text.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_size": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "hidden_act": getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None),
        "max_position_embeddings": getattr(text, "max_position_embeddings", None),
        "mapping": {"world_size": 1, "gpus_per_node": 1, "tp_size": 1, "pp_size": 1, "cp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "redrafter_num_beams": 1,
        "redrafter_draft_len_per_beam": width - 1,
    }
    return {
        name: value for name, value in section.items() if value is not None
    }  # the older readers take no null


def build_config(max_seq_len: int, max_batch_size: int, width: int) -> dict[str, Any]:
    """As `trtllm-build` writes it: `max_seq_len` has room for a draft past the longest sequence."""
    return {
        "max_input_len": max_seq_len,
        "max_seq_len": max_seq_len + width - 1,
        "max_batch_size": max_batch_size,
        "max_beam_width": 1,
        "max_num_tokens": max_batch_size * (max_seq_len + width - 1),
        "opt_num_tokens": max_batch_size * width,
        "max_draft_len": width - 1,
        "speculative_decoding_mode": EXPLICIT_DRAFT_TOKENS,
        "kv_cache_type": "CONTINUOUS",
        "lora_config": {},
        "plugin_config": {
            "gpt_attention_plugin": None,
            "remove_input_padding": False,
            "paged_kv_cache": False,
            "tokens_per_block": 64,
            "context_fmha": False,
            "use_paged_context_fmha": False,
            "lora_plugin": None,
        },
    }
