"""TensorRT-RTX engines, as far as a machine without a GPU goes: the graph's numbers, the build, and what it checks."""

import importlib.util
import json
import time

import onnx_ir as ir
import pytest
import tiny
import torch
from builder import eager_greedy
from shell import speccompile

from speccompile.compiler.build import BuildOptions, build
from speccompile.export import tensorrt
from speccompile.export.errors import UserError
from speccompile.runtime import Engine

built_here = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed"
)
PROMPTS = ([3], [1, 2, 7, 3, 3], [0, 4, 1, 3, 2, 3, 6] * 3)
FUSED = dict(hidden_size=128, head_dim=64)  # a head size that TensorRT has a kernel for


@pytest.mark.parametrize(
    ("architecture", "draft"),
    [("llama", f) for f in ("causal-depth", "dflash2", "domino")]
    + [("gemma3_text", "jetspec"), ("cohere2", "dflash")],
)
def test_the_lowered_step_proposes_and_emits_the_same(pairs, onnx_instead, tmp_path, architecture, draft):
    """Fold, mask and single cache updates change no number: tokens, proposals and lengths of the reference road."""
    reference = pairs(architecture, draft=tiny.FAMILIES[draft])
    paths = str(reference.target_path), str(reference.draft_path)
    build(BuildOptions(*paths, tmp_path / "engine", max_seq_len=64, backend="tensorrt-rtx"))
    engine = Engine.load(tmp_path / "engine", threads=1)
    for prompt in PROMPTS:
        (expected,), (found,) = (
            e.generate([prompt], 24, prefill_chunk=5) for e in (reference.engine, engine)
        )
        assert found.token_ids == expected.token_ids
        assert found.proposals == expected.proposals
        assert found.acceptance_lengths == expected.acceptance_lengths
    ragged = engine.generate(PROMPTS, 24)
    assert [r.token_ids for r in ragged] == [eager_greedy(reference.target, p, 24) for p in PROMPTS]
    with pytest.raises(UserError, match="holds no plain step"):
        engine.generate([[1]], 2, speculation=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("tensorrt")
    target = tiny.save_target(root / "target", **FUSED)
    return target, tiny.save_draft(root / "draft", target, family="causal-depth")


def command(pair, out, *more, code=0):
    options = "--target", pair[0], "--draft", pair[1], "--out", out, "--max-seq-len", 64
    return speccompile("build", *options, "--backend", "tensorrt-rtx", *more, code=code)


@built_here
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_engine_is_built_without_a_gpu(pair, tmp_path, dtype):
    done = command(pair, tmp_path / "engine", "--dtype", dtype, "--sm", "89,120", "--json")
    report = json.loads(done.stdout)["tensorrt"]
    layers, (attention,) = report["layers"], report["attention"]
    assert layers["ATTENTION_OUTPUT"] == 4 + 2 and layers["KV_CACHE_UPDATE"] == 2 * (4 + 2)
    assert attention == {
        "mask": True, "lengths": False, "causal": "NONE", "decomposable": False, "layers": 6,
    }  # fmt: skip
    assert report["architectures"] == [89, 120]
    decode, prefill = (profile["tokens"] for profile in report["profiles"])
    assert decode == {"min": [1, 1], "opt": [4, 4], "max": [8, 4]} and prefill["max"] == [8, 64]
    d = json.loads(speccompile("inspect", tmp_path / "engine", "--json").stdout)
    assert d["tensorrt"]["kernels"][tensorrt.FUSED_ATTENTION] == 2 * 6
    assert d["inputs"][4] == {
        "name": "target.0.key", "role": "input", "dtype": dtype, "shape": ["batch", 2, 64 + 2 * 4, 64],
    }  # fmt: skip
    said = speccompile("inspect", tmp_path / "engine").stdout
    for words in (
        "KV_CACHE_UPDATE",
        "one additive mask",
        "_gemm_mha_v2",
        "8.9, 12.0; built here, not executed",
    ):
        assert words in " ".join(said.split())
    assert (
        "--graph shows ONNX graphs only"
        in speccompile("inspect", tmp_path / "engine", "--graph", "g.txt", code=2).stderr
    )
    if not torch.cuda.is_available():
        refused = speccompile("run", tmp_path / "engine", "--prompt-ids", "1", code=2).stderr
        assert "runs on an NVIDIA GPU, which PyTorch does not find here" in refused
    assert {p.name for p in tmp_path.iterdir()} == {"engine"}


@built_here
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--sm", "90"), "--sm 90 is no compute capability TensorRT-RTX builds for; choose among 75"),
        (("--sm", "8.9"), "--sm '8.9' is not a list of whole numbers"),
        (("--sm", "75,89", "--dtype", "bfloat16"), "--sm 75 has no bfloat16"),
        (("--dtype", "float32"), "--dtype float32 is not something tensorrt-rtx computes in"),
        (("--prefill-chunk", "0"), "--prefill-chunk 0 is less than one block"),
        (("--max-batch-size", "4000000"), "a TensorRT tensor holds at most 2147483647; lower --max-batch-size"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(pair, tmp_path, more, words):
    assert words in " ".join(command(pair, tmp_path / "engine", *more, code=2).stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_missing_library_is_named(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'speccompile[tensorrt-rtx]'" in command(pair, tmp_path / "engine", code=2).stderr


@pytest.mark.parametrize(
    ("architecture", "draft", "words"),
    [
        ("gpt_oss", {}, "attends with attention sinks"),
        ("gemma2", {}, "attends with a soft-cap"),
        ("llama", tiny.FAMILIES["eagle3"], "updates a cache several times"),
        ("llama", tiny.FAMILIES["dspark"] | {"head_candidates": 4000}, "choose among|chooses among 4000"),
    ],
)
def test_what_native_layers_cannot_do_is_refused(tmp_path, onnx_instead, architecture, draft, words):
    target = tiny.save_target(tmp_path / "target", architecture, vocab_size=4096)
    draft = tiny.save_draft(tmp_path / "draft", target, **draft)
    with pytest.raises(UserError, match=words):
        build(
            BuildOptions(str(target), str(draft), tmp_path / "engine", max_seq_len=64, backend="tensorrt-rtx")
        )
    assert {p.name for p in tmp_path.iterdir()} == {"target", "draft"}


@built_here
def test_attention_without_a_fused_kernel_is_refused(pairs, tmp_path):
    odd = pairs(draft={"family": "dflash"})  # heads of 8
    done = command((odd.target_path, odd.draft_path), tmp_path / "engine", "--sm", "89", code=2)
    assert "no fused kernel for this pair's attention" in done.stderr and not list(tmp_path.iterdir())


@built_here
def test_the_parsers_error_names_the_layer(tmp_path):
    x = ir.val("x", ir.DataType.FLOAT16, ["batch", "rows"])
    node = ir.node("NoSuchThing", [x], domain="nowhere", name="model.layers.3.mlp/NoSuchThing_7")
    node.outputs[0].name = "y"
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 24, "nowhere": 1}, name="step")
    model = ir.Model(graph, ir_version=10)
    with pytest.raises(UserError, match=r"refused node 'model.layers.3.mlp/NoSuchThing_7' \(NoSuchThing\)"):
        tensorrt.build_engine(model, tmp_path / "e", tensorrt.step_profiles(model, 4, 8, 2), (89,), False)
    assert not list(tmp_path.iterdir())


ATTENTION = {
    "name": "a", "type": "ATTENTION_OUTPUT", "mask": True, "lengths": False, "causal": "NONE", "decomposable": False,
}  # fmt: skip
LAUNCH = (
    'function={{ name={} fqn=f args={{ }} input_args={{ {} }} shape_args_count=1 output_args={{ "out" }} }}\n'
)


@pytest.mark.parametrize(
    ("layer", "launches", "words"),
    [
        ({}, [("_gemm_mha_v2", '"q"'), ("__myl_ReshTran", '"target.0.key.out.1"')], None),
        ({"mask": False}, [("_gemm_mha_v2", '"q"')], "changed the attention of a"),
        ({"lengths": True}, [("_gemm_mha_v2", '"q"')], "changed the attention of a"),
        ({"causal": "UPPER_LEFT"}, [("_gemm_mha_v2", '"q"')], "changed the attention of a"),
        ({"decomposable": True}, [("_gemm_mha_v2", '"q"')], "changed the attention of a"),
        ({}, [("__myl_Fc", '"q"')], "fused 0 of 1 attentions"),
        (
            {},
            [("_gemm_mha_v2", '"q"'), ("__myl_ReshReplReshMove", '"draft.1.value.out [profile 1].1"')],
            "reads a cache outside its attention kernel \\(in __myl_ReshReplReshMove",
        ),
    ],
)
def test_an_engine_that_lost_something_is_not_kept(tmp_path, layer, launches, words):
    (tmp_path / "e").write_text("junk\0" + "".join(LAUNCH.format(*launch) for launch in launches))
    check = lambda: tensorrt._check([ATTENTION | layer], tensorrt.describe(tmp_path / "e"), 1)  # noqa: E731
    if words is None:
        check()
    else:
        with pytest.raises(UserError, match=words):
            check()


@built_here
@pytest.mark.slow
def test_a_real_models_engine(smollm2, tmp_path):
    from speccompile.compiler import checkpoint
    from speccompile.compiler.drafts.loading import save_draft
    from speccompile.compiler.init_draft import random_draft

    (tmp_path / "draft").mkdir()
    save_draft(
        random_draft(checkpoint.target_config(smollm2), "causal-depth", 2, 8, None, 0), tmp_path / "draft"
    )
    start = time.perf_counter()
    report = build(
        BuildOptions(
            str(smollm2), str(tmp_path / "draft"), tmp_path / "engine", backend="tensorrt-rtx", sm=(89, 120)
        )
    )
    print(f"built in {time.perf_counter() - start:.0f} s: {report['bytes']}")
    assert report["tensorrt"]["layers"]["ATTENTION_OUTPUT"] == 30 + 2
