"""SGLang 0.5's flags. Those of speculative decoding are all here (a test reads them from its wheel)."""

from typing import Any

from speccompile.compiler.port.plan import (
    CHANGED,
    ENGINE_TUNING,
    MISSING,
    NOT_NEEDED,
    PORTED,
    Ported,
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

ALGORITHMS = {
    "DFLASH": "DFlash, DFlash 2 or Domino, as the checkpoint says",
    "DSPARK": "DSpark",
    "EAGLE3": "EAGLE-3 as a chain",
}
ALIASES = {
    "model": "model-path", "speculative-draft-model": "speculative-draft-model-path", "tensor-parallel-size": "tp-size", "tp": "tp-size",
    "pipeline-parallel-size": "pp-size", "pp": "pp-size", "data-parallel-size": "dp-size", "dp": "dp-size", "expert-parallel-size": "ep-size", "ep": "ep-size",
    "speculative-dflash-draft-window-size": "speculative-draft-window-size",
}  # fmt: skip


def check(flags: dict[str, Any]) -> None:
    """Raises UserError for a launch that nothing here can stand in for."""
    algorithm = str(flags.get("speculative-algorithm", "")).upper()
    if not algorithm:
        raise UserError("The launch has no --speculative-algorithm, so there is no draft to port.")
    if algorithm not in ALGORITHMS:
        raise UserError(
            f"--speculative-algorithm {algorithm} has no counterpart; {', '.join(ALGORITHMS)} have."
        )
    for flag in ("speculative-accept-threshold-single", "speculative-accept-threshold-acc"):
        if float(flags.get(flag, 1.0)) != 1.0:
            raise UserError(
                f"--{flag} {flags[flag]} accepts tokens that the target would not have chosen; here output is exact, so it is not ported: leave it out."
            )
    if algorithm == "DFLASH":
        widths = {
            str(flags[f])
            for f in ("speculative-dflash-block-size", "speculative-num-draft-tokens")
            if f in flags
        }
        if len(widths) > 1:
            raise UserError(
                f"--speculative-dflash-block-size and --speculative-num-draft-tokens are one number and say {' and '.join(sorted(widths))}."
            )


def _algorithm(ported: Ported, value: Any) -> tuple[str, str]:
    return PORTED, f"{ALGORITHMS[str(value).upper()]}: `build` recognises the draft by its checkpoint"


def _draft_tokens(ported: Ported, value: Any) -> tuple[str, str]:
    """Rows, for DFLASH and DSPARK; for EAGLE3 the nodes of a tree, of which the chain has steps + 1."""
    if "block-width" in ported.build and ported.build["block-width"] != str(value):
        return CHANGED, f"the chain has {ported.build['block-width']} rows"
    ported.build["block-width"] = str(value)
    return PORTED, f"build --block-width {value} (rows, the anchor included, as SGLang counts)"


def _gamma(ported: Ported, value: Any) -> tuple[str, str]:
    ported.build["block-width"] = str(int(value) + 1)
    return PORTED, f"build --block-width {int(value) + 1} (proposals and the anchor)"


def _steps(ported: Ported, value: Any) -> tuple[str, str]:
    if ported.algorithm != "EAGLE3":
        return NOT_NEEDED, "one pass drafts the whole block (SGLang sets it to 1)"
    ported.build["block-width"] = str(int(value) + 1)
    return PORTED, f"build --block-width {int(value) + 1} (a chain of {value} proposals, and the anchor)"


def _top_k(ported: Ported, value: Any) -> tuple[str, str]:
    if int(value) == 1 or ported.algorithm != "EAGLE3":
        return NOT_NEEDED, "a chain has one candidate a step"
    ported.warnings.append(
        f"The tree (--speculative-eagle-topk {value}) becomes a chain: same text, some acceptance lost; `bench` shows how much."
    )
    return CHANGED, "a chain instead of the tree"


def _pool(ported: Ported, value: Any) -> tuple[str, str]:
    ported.build["head-candidates"] = str(value)
    return (
        CHANGED,
        f"build --head-candidates {value}; candidates are each row's own, not shared by the block: proposals may differ",
    )


def _confidence(ported: Ported, value: Any) -> tuple[str, str]:
    return MISSING, "build --confidence-threshold cuts blocks at a fixed confidence instead"


def _exact_sampling(ported: Ported, value: Any) -> tuple[str, str]:
    ported.build["sampling"] = None
    return CHANGED, "build --sampling: exact, with the draft's likeliest tokens as proposals"


ngram = missing("n-gram speculation is not there")
RULES: dict[str, Rule] = {
    "model-path": build_option("target"),
    "speculative-algorithm": _algorithm,
    "speculative-draft-model-path": build_option("draft"),
    "speculative-draft-model-revision": revision("draft"),
    "revision": revision("target"),
    "speculative-draft-load-format": not_needed("safetensors"),
    "load-format": not_needed("safetensors"),
    "speculative-num-steps": _steps,
    "speculative-eagle-topk": _top_k,
    "speculative-num-draft-tokens": _draft_tokens,
    "speculative-dflash-block-size": _draft_tokens,
    "speculative-dspark-block-size": _gamma,
    "speculative-domino-candidate-pool-size": _pool,
    "speculative-dspark-sps-table-path": _confidence,
    "speculative-dspark-confidence-sts-path": _confidence,
    "speculative-dspark-align-verify-tokens-to-graph-tier": not_needed("a block has one width"),
    "speculative-accept-threshold-single": not_needed("1: acceptance is exact"),
    "speculative-accept-threshold-acc": not_needed("1: acceptance is exact"),
    "speculative-use-rejection-sampling": _exact_sampling,
    "speculative-use-block-verification": _exact_sampling,
    "speculative-token-map": missing("a reduced vocabulary is part of the draft's checkpoint (d2t)"),
    "speculative-attention-mode": ENGINE_TUNING,
    "speculative-draft-attention-backend": ENGINE_TUNING,
    "speculative-dsa-topk-backend": ENGINE_TUNING,
    "speculative-draft-kv-cache-dtype": cache_dtype,
    "speculative-draft-window-size": missing("the draft sees its whole cache, or the window its checkpoint says: proposals may differ, text does not"),
    "speculative-draft-sink-size": missing("goes with the draft window"),
    "speculative-moe-runner-backend": ENGINE_TUNING,
    "speculative-moe-a2a-backend": ENGINE_TUNING,
    "speculative-enable-w4a4-mxfp4-megamoe": missing("checkpoints in 16 or 32 bits only"),
    "speculative-draft-model-quantization": quantization,
    "speculative-adaptive": missing("a block has one width; `bench --block-width 2,4,8` finds the best for a load"),
    "speculative-adaptive-config": missing("goes with --speculative-adaptive"),
    "enable-multi-layer-eagle": missing("one EAGLE-3 layer drafts the chain"),
    "uno-lora-path": missing("UNO is not there"),
    "spec-trace-dir": missing("`run --json` prints every step's acceptance"),
    **{
        f"speculative-ngram-{name}": ngram
        for name in (
            "min-bfs-breadth", "max-bfs-breadth", "match-type", "max-trie-depth", "capacity",
            "external-corpus-path", "external-sam-budget", "external-corpus-max-tokens",
        )
    },
    "tokenizer-path": missing("the engine has its target's tokenizer; put another's files into the target's directory before building"),
    "chat-template": missing("the engine has its target's chat template; change it there before building"),
    "context-length": build_option("max-seq-len"),
    "max-running-requests": build_option("max-batch-size"),
    "max-total-tokens": memory_share,
    "mem-fraction-static": memory_share,
    "chunked-prefill-size": missing("TensorRT: build --prefill-chunk; elsewhere chunks adapt to the load"),
    "max-prefill-tokens": missing("chunks adapt to the load"),
    "max-queued-requests": serve_option("max-waiting"),
    "dtype": dtype,
    "quantization": quantization,
    "kv-cache-dtype": cache_dtype,
    "trust-remote-code": trust_remote_code,
    "tp-size": parallel("Tensor parallelism"),
    "pp-size": parallel("Pipeline parallelism"),
    "dp-size": parallel("Data parallelism"),
    "ep-size": parallel("Expert parallelism"),
    "nnodes": parallel("A launch"),
    "host": serve_option("host"),
    "port": serve_option("port"),
    "api-key": api_key,
    "served-model-name": serve_option("model-name"),
    "enable-metrics": not_needed("/metrics is always there"),
    "disable-radix-cache": not_needed("prompts share what their slots' caches hold"),
    "tool-call-parser": missing("tools are refused by serve"),
    "reasoning-parser": missing("answers are not taken apart"),
    "json-model-override-args": missing("change the target's config.json before building"),
    **dict.fromkeys(
        (
            "attention-backend", "prefill-attention-backend", "decode-attention-backend", "sampling-backend", "grammar-backend",
            "disable-cuda-graph", "cuda-graph-max-bs", "cuda-graph-bs", "page-size", "schedule-policy", "enable-torch-compile",
            "disable-overlap-schedule", "skip-server-warmup", "log-level", "device", "mamba-scheduler-strategy", "random-seed", "stream-interval",
        ),
        ENGINE_TUNING,
    ),
}  # fmt: skip
