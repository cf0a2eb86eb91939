"""The pipeline: two checkpoints in, one engine directory out."""

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from safetensors.torch import save
from transformers import PretrainedConfig

from speccompile.compiler import backends, checkpoint, referee, samples, tracing
from speccompile.compiler.backends import Backend
from speccompile.compiler.drafts.config import DraftConfig
from speccompile.compiler.drafts.loading import load_draft, resolve_draft
from speccompile.compiler.sampling import LOG_PROBABILITY_OUTPUTS, SAMPLING_INPUTS
from speccompile.compiler.stages import Stage, flat_copy, inline
from speccompile.compiler.step import Step
from speccompile.export import directory as engine
from speccompile.export import memory, tensorrt, torch_program
from speccompile.export.engine_config import build_config, pretrained_config
from speccompile.export.errors import UserError
from speccompile.export.onnx import to_onnx
from speccompile.export.weights import externalise
from speccompile.passes import PassResult, run_passes
from speccompile.passes.program import Program
from speccompile.passes.tap_hidden_states import tap_hidden_states
from speccompile.plugins.block_attention.contract import DOMAIN, PLUGINS, VERSION

DEFAULT_MAX_SEQ_LEN = 2048


@dataclass(frozen=True)
class BuildOptions:
    target: str
    draft: str
    out: Path
    block_width: int | None = None
    """None: the width the draft was trained at."""
    confidence_threshold: float | None = None
    """Cut a block at the first proposal that the draft holds less probable than this; None keeps all."""
    head_candidates: int | None = None
    """A serial head scores so many of a row's best tokens; None: as the draft says, 0: the whole vocabulary."""
    max_seq_len: int | None = None
    """None: what the target allows, at most 2048."""
    max_batch_size: int = 8
    dtype: str | None = None
    """None: the back end's first."""
    backend: str = "onnxruntime"
    sm: tuple[int, ...] = ()
    """TensorRT: compute capabilities to build for (89 for 8.9); empty: all that have the dtype."""
    sampling: bool = False
    """The step takes temperature, top-k, top-p, min-p and uniform numbers; otherwise it is greedy."""
    plugin: bool = False
    """TensorRT: attention and cache updates by our plugins instead of TensorRT's own layers."""
    prefill_chunk: int = 512
    """TensorRT: most rows of a step, the upper end of its second profile."""
    force: bool = False
    trust_remote_code: bool = False


@dataclass
class BuildLog:
    """What happened, for the report: seconds of each stage and what each pass matched."""

    announce: Callable[[str], None] = lambda stage: None
    advance: Callable[[str, int, int], None] = lambda phase, step, of: None
    """Called within a stage that knows how far it is."""
    stages: dict[str, float] = field(default_factory=dict)
    passes: dict[str, list[PassResult]] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.announce(name)
        start = time.perf_counter()
        yield
        self.stages[name] = time.perf_counter() - start


def build(options: BuildOptions, log: BuildLog | None = None) -> dict[str, Any]:
    """Build an engine directory at `options.out` and return its report. Raises UserError for what a user can mend."""
    log = log or BuildLog()
    with log.stage("check"):
        backend, options = _check_options(options)
        target_path, draft_path = checkpoint.resolve(options.target), checkpoint.resolve(options.draft)
        config = checkpoint.target_config(target_path, options.trust_remote_code)
        draft_config = _draft_options(options, resolve_draft(draft_path, config))
        width, max_seq_len = _limits(options, config, draft_config)
        _check_space(options, checkpoint.weight_bytes(target_path) + checkpoint.weight_bytes(draft_path))
    with engine.atomic_directory(options.out, options.force) as building, torch.no_grad():
        with log.stage("load target"):
            model = checkpoint.load_target(target_path, config, options.dtype, options.trust_remote_code)
        with log.stage("load draft"):
            draft = load_draft(draft_path, draft_config, options.dtype)
            draft.lend(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        capacity = max_seq_len + 2 * width  # a block past the last token, and the draft's block past that
        with log.stage("trace target"):
            shapes = tracing.cache_shapes(model)
            parts = referee.chunks(model, max_seq_len)
            expected = referee.eager_logits(model, parts)
            target = tracing.trace_target(model, shapes, capacity, max_seq_len)
        with log.stage("check target"):
            referee.check_target(target, config, shapes, parts, expected)
        with log.stage("trace draft"):
            inject, propose = tracing.trace_draft(draft, width, capacity, model.dtype, max_seq_len)
        caches = _named_caches("target", shapes) | _named_caches(
            "draft", tracing.draft_cache_shapes(draft_config)
        )
        dtype = model.dtype
        del model, draft
        with log.stage("fuse"):
            fused, taps = _fuse(
                width, target, (inject, propose), draft_config, options, caches, capacity, dtype
            )
            programs = [(backend.step_file, fused, width, taps)]
            if backend.plain_file:
                target_caches = {name: shape for name, shape in caches.items() if name.startswith("target.")}
                plain, no_taps = _fuse(1, target, (), None, options, target_caches, capacity, dtype)
                plain.merged = fused.merged
                programs.append((backend.plain_file, plain, 1, no_taps))
        with log.stage("record samples"), _written(options.out):
            prompt, longest = torch.cat(parts, dim=1), min(options.prefill_chunk, max_seq_len)
            recorded = samples.record(fused, caches, dtype, prompt, width, longest)
            (building / engine.SAMPLES).write_bytes(save(recorded))
        models: dict[str, ir.Model] = {}
        nodes = {}
        weights = torch_program.Weights()
        lowering = "tensorrt-plugin" if options.plugin else backend.lowering
        for name, program, rows, tapped in programs:
            with log.stage(f"passes ({name})"):
                log.passes[name] = [tapped, *run_passes(program, lowering)]
            graph_module, inputs, outputs = program.graph_module, program.inputs, program.outputs
            nodes[name] = len(graph_module.graph.nodes)
            dims = _dims(program, caches, capacity, rows)
            if backend.kind == "tensorrt":
                tensorrt.check_program(graph_module, options.plugin)
            with log.stage(f"export {name}"):
                if backend.kind == "torch":
                    exported, names = torch_program.to_exported_program(graph_module, inputs, dims, weights)
                    with _written(options.out):
                        torch_program.save_program(exported, inputs, outputs, names, building / name)
                else:
                    models[name] = to_onnx(graph_module, inputs, outputs, dims, lowering)
                    nodes[name] = len(models[name].graph)
        settings = {
            "contract_version": engine.CONTRACT_VERSION,
            "backend": options.backend,
            "sampling": options.sampling,
            "dtype": options.dtype,
            "step_file": backend.step_file,
            "plain_file": backend.plain_file,
            "block_width": width,
            "max_seq_len": max_seq_len,
            "max_batch_size": options.max_batch_size,
            "capacity": capacity,
            "caches": {name: {"heads": heads, "size": size} for name, (heads, size) in caches.items()},
            "aliases": {name: program.aliases for name, program, *_ in programs},
            "stop_token_ids": checkpoint.stop_token_ids(target_path, config),
            "vocab_size": config.get_text_config().vocab_size,
            "target": {
                "path": str(target_path.resolve()),
                "model_type": config.model_type,
                "trust_remote_code": options.trust_remote_code,
            },
            "draft": {
                "path": str(draft_path.resolve()),
                "family": draft_config.family,
                "confidence_threshold": options.confidence_threshold,
                "resolved": draft_config.describe(),
                **asdict(draft_config),
            },
        }
        settings["tensors"] = _tensors(fused, _dims(fused, caches, capacity, width))
        facts: dict[str, Any] = {"nodes": nodes}
        if backend.kind == "torch":
            settings["weights_file"] = engine.TORCH_WEIGHTS
            facts["operations"] = {name: _operations(program) for name, program, *_ in programs}
            with log.stage("write weights"), _written(options.out):
                weights.save(building / engine.TORCH_WEIGHTS)
        if backend.kind == "tensorrt":
            settings["plugins"] = [
                {"name": n, "namespace": DOMAIN, "version": VERSION} for n in PLUGINS
            ] * options.plugin
            with log.stage("build engine"), _written(options.out):
                facts["tensorrt"] = _build_tensorrt(building, options, models, settings, log)
                models = {}
        with log.stage("write"), _written(options.out):
            return _write(building, options, models, settings, config, target_path, log, facts)


def _tensors(program: Program, dims: dict[str, list]) -> list[dict[str, Any]]:
    """The step's inputs and outputs, with the input whose buffer an output is bound to."""
    nodes = [(name, "input", program.placeholder(name)) for name in program.inputs]
    nodes += [(name, "output", program.returned(name)) for name in program.outputs]
    return [
        {
            "name": name,
            "role": role,
            "dtype": str(node.meta["val"].dtype).removeprefix("torch."),
            "shape": dims[name],
        }
        | ({"bound_to": program.aliases[name]} if role == "output" and name in program.aliases else {})
        for name, role, node in nodes
    ]


def _operations(program: Program) -> dict[str, int]:
    calls = (str(n.target) for n in program.graph.nodes if n.op == "call_function")
    return dict(Counter(calls).most_common())


@contextlib.contextmanager
def _written(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{out} could not be written ({error.strerror or error}); nothing was left behind."
        ) from None


def _build_tensorrt(
    building: Path,
    options: BuildOptions,
    models: dict[str, ir.Model],
    settings: dict[str, Any],
    log: BuildLog,
) -> dict[str, Any]:
    """Build the step's engine. Returns what the report says of it; its profiles go into the settings."""
    (name, model), *_ = models.items()
    chunk = min(options.prefill_chunk, settings["max_seq_len"])
    profiles = tensorrt.step_profiles(model, settings["block_width"], chunk, options.max_batch_size)
    settings["prefill_chunk"] = chunk
    backend = backends.choose(options.backend)
    architectures = options.sm or tuple(
        sm
        for sm in tensorrt.ARCHITECTURES
        if backend.library == "tensorrt_rtx" and not (options.dtype == "bfloat16" and sm == 75)
    )
    return tensorrt.build_engine(
        model, building / name, profiles, architectures, options.plugin, log.advance, backend.library
    )


def _check_options(options: BuildOptions) -> tuple[Backend, BuildOptions]:
    """The back end, and the options with its dtype where none was given."""
    engine.check_destination(options.out, options.force)
    backend = backends.choose(options.backend)
    options = replace(options, dtype=options.dtype or backend.dtypes[0])
    if options.dtype not in backend.dtypes:
        raise UserError(
            f"--dtype {options.dtype} is not something {backend.name} computes in here; choose one of: {', '.join(backend.dtypes)}."
        )
    if backend.kind == "tensorrt":
        if options.sampling:
            raise UserError(
                f"--sampling is not something --backend {backend.name} has yet (its histograms need an operation TensorRT lacks); onnxruntime and torch do."
            )
        tensorrt.check_installed(backend.library)
        if backend.library == "tensorrt_rtx":
            tensorrt.check_architectures(options.sm, options.dtype)
        elif options.sm:
            raise UserError(
                "--sm is of no use to --backend tensorrt, which builds for this machine's GPU; --backend tensorrt-rtx takes it."
            )
        options = replace(options, plugin=options.plugin or backend.lowering == "tensorrt-plugin")
        if options.prefill_chunk < (options.block_width or 1):
            raise UserError(
                f"--prefill-chunk {options.prefill_chunk} is less than one block; give at least the block width."
            )
    elif options.plugin:
        raise UserError(
            f"--plugin is of no use to --backend {backend.name}; it chooses between TensorRT's layers and ours."
        )
    elif options.sm:
        raise UserError(f"--sm is of no use to --backend {backend.name}, which runs on a {backend.runs_on}.")
    if options.block_width is not None and options.block_width < 2:
        raise UserError(
            f"--block-width {options.block_width} leaves no row to propose with; give at least 2 (one anchor and one proposal)."
        )
    if options.max_batch_size < 1:
        raise UserError(f"--max-batch-size {options.max_batch_size} is not a batch; give at least 1.")
    return backend, options


def _draft_options(options: BuildOptions, draft: DraftConfig) -> DraftConfig:
    """The draft's configuration with what the build overrides. Raises UserError for what does not fit it."""
    if options.confidence_threshold is not None:
        if draft.confidence == "none":
            raise UserError(
                f"--confidence-threshold was given, but the {draft.family} draft has no confidence head to compare with it."
            )
        if not 0.0 < options.confidence_threshold < 1.0:
            raise UserError(
                f"--confidence-threshold {options.confidence_threshold} is no probability to cut at; give a number between 0 and 1."
            )
    if options.head_candidates is None:
        return draft
    if draft.head not in ("markov", "markov_gated", "markov_rnn", "gru"):
        raise UserError(
            f"--head-candidates was given, but the draft's head ({draft.head}) does not choose among a row's tokens one after the other, or says itself how many."
        )
    if not 0 <= options.head_candidates <= draft.head_rows:
        raise UserError(
            f"--head-candidates {options.head_candidates} is not from 0 (all) to the draft's vocabulary of {draft.head_rows} tokens."
        )
    return replace(draft, head_candidates=options.head_candidates or None)


def _limits(options: BuildOptions, config: PretrainedConfig, draft: DraftConfig) -> tuple[int, int]:
    width = options.block_width or draft.block_width
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    max_seq_len = options.max_seq_len or min(longest or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN)
    if longest and max_seq_len > longest:
        raise UserError(
            f"--max-seq-len {max_seq_len} is more than the {longest} positions the target was made for (max_position_embeddings)."
        )
    if draft.head == "jacobi" and width != draft.block_width:
        raise UserError(
            f"--block-width {width} does not fit the xpress draft: its head mixes exactly the {draft.block_width} rows it was trained with."
        )
    if max_seq_len < width:
        raise UserError(
            f"--max-seq-len {max_seq_len} cannot hold one block of {width} rows; give at least {width}."
        )
    return width, max_seq_len


def _check_space(options: BuildOptions, needed: int) -> None:
    parent = options.out.resolve().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(
            f"{parent} has {memory.human(free)} free, but the engine needs about {memory.human(needed)}; free some space or choose another --out."
        )


def _named_caches(owner: str, shapes: list[tracing.CacheShape]) -> dict[str, tuple[int, int]]:
    """{"target.0.key": (heads, size), "target.0.value": …}"""
    return {
        f"{owner}.{layer}.{kind}": (shape.heads, size)
        for layer, shape in enumerate(shapes)
        for kind, size in (("key", shape.key_size), ("value", shape.value_size))
    }


def _fuse(
    width: int,
    target: Stage,
    draft: tuple[Stage, ...],
    draft_config: DraftConfig | None,
    options: BuildOptions,
    caches: dict[str, tuple[int, int]],
    capacity: int,
    dtype: torch.dtype,
) -> tuple[Program, PassResult]:
    """The step at `width` over the traced stages, as one program; without draft stages it is plain decoding.

    Hidden states are tapped before the stages are fused; what that pass did is the second result.
    """
    names = {owner: [n for n in caches if n.startswith(owner)] for owner in ("target", "draft")}
    examples = {
        owner: [
            torch.zeros(tracing.BATCH, caches[n][0], capacity, caches[n][1], dtype=dtype)
            for n in names[owner]
        ]
        for owner in names
    }
    taps = draft_config.tapped_hidden_states if draft_config else ()
    tapped, tap_result = _tapped(target, taps, names["target"])
    chain = draft_config is not None and draft_config.backbone == "chain"
    confident = draft_config is not None and draft_config.confidence != "none"
    threshold = options.confidence_threshold if confident else None
    step = Step(
        width,
        tapped,
        *draft,
        chain=chain,
        confident=confident,
        threshold=threshold,
        sampling=options.sampling,
    )
    stages = [tapped, *draft]
    graph_module = tracing.trace_step(
        step, stages, examples["target"], examples["draft"], chain, options.sampling, width
    )
    inline(graph_module, stages)
    small = ["emitted", "num_emitted", "new_lengths", *LOG_PROBABILITY_OUTPUTS * options.sampling]
    small += ["block"] * bool(draft) + ["confidence"] * confident + ["num_proposed"] * (threshold is not None)
    inputs = ["tokens", "num_tokens", "num_known", "lengths", *names["target"], *names["draft"]]
    inputs += ["next_tokens"] * chain + list(SAMPLING_INPUTS) * options.sampling
    aliases = {f"{name}.out": name for name in (*names["target"], *names["draft"])}
    return Program(graph_module, inputs, [*small, *aliases], aliases), tap_result


def _tapped(target: Stage, taps: tuple[int, ...], caches: list[str]) -> tuple[Stage, PassResult]:
    """The target stage with `features` of these hidden states in place of all."""
    graph_module = flat_copy(target.graph_module)
    outputs = next(n for n in graph_module.graph.nodes if n.op == "output").args[0]
    hidden = [f"hidden.{i}" for i in range(len(outputs) - 1 - len(caches))]
    start = time.perf_counter()
    program = Program(graph_module, ["tokens", "lengths", *caches], ["logits", *hidden, *caches])
    matches = tap_hidden_states(program, taps)
    result = PassResult(tap_hidden_states.__name__, matches, time.perf_counter() - start)

    def output_shapes(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        logits, *states = target.output_shapes(inputs)
        size = states[0].shape[-1] * len(taps)
        features = [states[0].new_empty(*states[0].shape[:-1], size)] if taps else []
        return [logits, *features, *states[len(hidden) :]]

    return Stage(target.name, graph_module, output_shapes), result


def _dims(program: Program, caches: dict[str, tuple[int, int]], capacity: int, width: int) -> dict[str, list]:
    dims: dict[str, list] = {
        "tokens": ["batch", "rows"],
        "emitted": ["batch", width],
        "block": ["batch", width],
        "confidence": ["batch", width - 1],
        "uniforms": ["batch", width],
        "logprobs": ["batch", width],
    }
    for name in set(program.outputs) & {"top_tokens", "top_logprobs"}:
        dims[name] = ["batch", width, program.returned(name).meta["val"].shape[2]]
    for name in (*program.inputs, *program.outputs):
        cache = program.aliases.get(name, name)
        if cache in caches:
            heads, size = caches[cache]
            dims[name] = ["batch", heads, capacity, size]
        else:
            dims.setdefault(name, ["batch"])
    return dims


def _write(
    building: Path,
    options: BuildOptions,
    models: dict[str, ir.Model],
    settings: dict[str, Any],
    config: PretrainedConfig,
    target_path: Path,
    log: BuildLog,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Write everything but a TensorRT engine, which lies there already. `facts` of the build join the report."""
    if models:
        externalise(models.values(), building / engine.WEIGHTS)
    for name, model in models.items():
        ir.save(model, building / name)
    for name in engine.TOKENIZER_FILES:
        if (target_path / name).exists():
            shutil.copyfile(target_path / name, building / name)
    engine.write_json(
        building / "config.json",
        {
            "version": version("speccompile"),
            "pretrained_config": pretrained_config(config, options.dtype, settings["block_width"]),
            "build_config": build_config(
                settings["max_seq_len"], options.max_batch_size, settings["block_width"]
            ),
            "speccompile": settings,
        },
    )
    report = {
        "stages": log.stages,
        "passes": {name: [asdict(result) for result in results] for name, results in log.passes.items()},
        "bytes": {path.name: path.stat().st_size for path in sorted(building.iterdir())},
        "draft": settings["draft"],
        "cache_bytes_per_sequence": {
            owner: memory.cache_bytes(settings, owner) for owner in ("target", "draft")
        },
    } | facts
    engine.write_json(building / "report.json", report)
    packages = ["speccompile", "torch", "transformers", "onnx", "onnxscript", "onnxruntime"]
    versions = {name: version(name) for name in packages}
    if "tensorrt" in facts:
        versions[facts["tensorrt"]["library"]] = facts["tensorrt"]["version"]
    engine.write_manifest(building, versions)
    return report
