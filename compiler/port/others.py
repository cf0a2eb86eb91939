"""vLLM's and TensorRT-LLM's flags. Both count proposals, where a block's width counts rows."""

import json
from typing import Any

from speccompile.compiler.port.plan import (
    ENGINE_TUNING,
    MISSING,
    NOT_NEEDED,
    Rule,
    api_key,
    build_option,
    cache_dtype,
    dtype,
    memory_share,
    missing,
    not_needed,
    parallel,
    quantization,
    revision,
    serve_option,
    trust_remote_code,
)
from speccompile.export.errors import UserError

VLLM_METHODS = ("dflash", "dspark", "eagle3", "speculators")
TENSORRT_LLM_TYPES = ("dflash", "eagle3", "eagle")


def _rows(value: Any) -> int:
    return int(value) + 1


proposals = build_option("block-width", _rows, "they count proposals, a width counts the anchor too")
VLLM_CONFIG: dict[str, Rule] = {
    "method": not_needed("`build` recognises the draft by its checkpoint"),
    "model": build_option("draft"),
    "num-speculative-tokens": proposals,
    "revision": revision("draft"),
    "quantization": quantization,
    "draft-tensor-parallel-size": parallel("The draft's tensor parallelism"),
    "max-model-len": missing("the draft's cache is as long as the target's"),
    "draft-sample-method": lambda ported, value: (
        (NOT_NEEDED, "proposals are the draft's likeliest tokens")
        if value == "greedy"
        else (
            MISSING,
            "proposals are the draft's likeliest tokens: the same law of the text, other acceptance",
        )
    ),
    "parallel-drafting": not_needed("as the draft is"),
    "attention-backend": ENGINE_TUNING,
}
VLLM: dict[str, Rule] = {
    "model": build_option("target"),
    "max-model-len": build_option("max-seq-len"),
    "max-num-seqs": build_option("max-batch-size"),
    "gpu-memory-utilization": memory_share,
    "kv-cache-memory-bytes": memory_share,
    "max-num-batched-tokens": missing("chunks adapt to the load"),
    "dtype": dtype,
    "quantization": quantization,
    "kv-cache-dtype": cache_dtype,
    "revision": revision("target"),
    "trust-remote-code": trust_remote_code,
    "tensor-parallel-size": parallel("Tensor parallelism"),
    "pipeline-parallel-size": parallel("Pipeline parallelism"),
    "data-parallel-size": parallel("Data parallelism"),
    "served-model-name": serve_option("model-name"),
    "host": serve_option("host"),
    "port": serve_option("port"),
    "api-key": api_key,
    "tokenizer": missing("the engine has its target's tokenizer"),
    "chat-template": missing("the engine has its target's chat template; change it there before building"),
    "tool-call-parser": missing("tools are refused by serve"),
    "enable-auto-tool-choice": missing("tools are refused by serve"),
    "reasoning-parser": missing("answers are not taken apart"),
    **dict.fromkeys(
        ("enable-prefix-caching", "no-enable-prefix-caching", "enable-chunked-prefill", "enforce-eager", "attention-backend", "block-size", "compilation-config", "seed"),
        ENGINE_TUNING,
    ),
}  # fmt: skip
TENSORRT_LLM_CONFIG: dict[str, Rule] = {
    "decoding-type": not_needed("`build` recognises the draft by its checkpoint"),
    "max-draft-len": proposals,
    "speculative-model": build_option("draft"),
    "speculative-model-dir": build_option("draft"),
    "mask-token-id": not_needed("read from the draft's checkpoint"),
    "target-layer-ids": not_needed("read from the draft's checkpoint"),
    "eagle3-one-model": not_needed("target and draft are one graph"),
}
TENSORRT_LLM: dict[str, Rule] = {
    "model": build_option("target"),
    "tokenizer": missing("the engine has its target's tokenizer"),
    "max-seq-len": build_option("max-seq-len"),
    "max-batch-size": build_option("max-batch-size"),
    "max-num-tokens": missing("TensorRT: build --prefill-chunk; elsewhere chunks adapt to the load"),
    "kv-cache-config": memory_share,
    "kv-cache-free-gpu-memory-fraction": memory_share,
    "dtype": dtype,
    "trust-remote-code": trust_remote_code,
    "tp-size": parallel("Tensor parallelism"),
    "pp-size": parallel("Pipeline parallelism"),
    "ep-size": parallel("Expert parallelism"),
    "tensor-parallel-size": parallel("Tensor parallelism"),
    "pipeline-parallel-size": parallel("Pipeline parallelism"),
    "moe-expert-parallel-size": parallel("Expert parallelism"),
    "host": serve_option("host"),
    "port": serve_option("port"),
    **dict.fromkeys(
        ("backend", "cuda-graph-config", "attn-backend", "disable-overlap-scheduler", "enable-chunked-prefill", "print-iter-log", "extra-llm-api-options"),
        ENGINE_TUNING,
    ),
}  # fmt: skip


def speculative_config(server: str, value: Any) -> dict[str, Any]:
    """The object in --speculative-config, its names with dashes. Raises UserError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"--speculative-config is not JSON ({error}): {value[:120]}") from None
    if not isinstance(value, dict):
        raise UserError(f"The {server} launch has no speculative-config, so there is no draft to port.")
    names = {str(key).replace("_", "-"): item for key, item in value.items()}
    kind = (
        str(names.get("method" if server == "vllm" else "decoding-type", ""))
        .lower()
        .replace("_", "")
        .replace("-", "")
    )
    known = VLLM_METHODS if server == "vllm" else TENSORRT_LLM_TYPES
    if kind and kind not in known:
        raise UserError(f"The speculation {kind!r} has no counterpart; {', '.join(known)} have.")
    return names
