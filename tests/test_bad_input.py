"""What users hand in wrongly: one sentence, exit code 2, nothing written."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from speccompile.compiler.cli import main


@pytest.fixture
def pair(tmp_path):
    target = tiny.save_target(tmp_path / "target")
    return target, tiny.save_draft(tmp_path / "draft", target), tmp_path / "engine"


def refused(capsys, monkeypatch, *arguments):
    """Run the command line; return its one sentence."""
    monkeypatch.setattr(sys, "argv", ["speccompile", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return " ".join(text.split())


def build_refused(capsys, monkeypatch, pair, *more):
    target, draft, out = pair
    before = set(out.parent.iterdir())
    text = refused(capsys, monkeypatch, "build", "--target", target, "--draft", draft, "--out", out, *more)
    assert set(out.parent.iterdir()) == before  # nothing half-written
    return text


def edit(path, **changes):
    file = path / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key)
        else:
            config[key] = value
    file.write_text(json.dumps(config))


def edit_tensors(path, change):
    file = path / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


def test_no_such_directory(capsys, monkeypatch, pair):
    text = build_refused(capsys, monkeypatch, (pair[0].with_name("nowhere"), *pair[1:]))
    assert "nowhere is neither a directory nor a Hugging Face hub id" in text


def test_a_file_in_place_of_a_directory(capsys, monkeypatch, pair):
    assert "is a file" in build_refused(capsys, monkeypatch, (pair[0] / "config.json", *pair[1:]))


def test_not_a_causal_language_model(capsys, monkeypatch, pair):
    edit(pair[0], model_type="vit", architectures=["ViTModel"])
    assert "'vit' model, which is not a causal language model" in build_refused(capsys, monkeypatch, pair)


def test_config_that_is_not_json(capsys, monkeypatch, pair):
    (pair[0] / "config.json").write_text("{oops")
    assert "config.json cannot be read as JSON" in build_refused(capsys, monkeypatch, pair)


def test_pickles_only(capsys, monkeypatch, pair):
    (pair[0] / "model.safetensors").unlink()
    torch.save({}, pair[0] / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in build_refused(capsys, monkeypatch, pair)


def test_truncated_safetensors(capsys, monkeypatch, pair):
    file = pair[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "is not a whole safetensors file" in build_refused(capsys, monkeypatch, pair)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_a_draft_for_another_target(capsys, monkeypatch, pair, tmp_path, key):
    other = {"hidden_size": 48, "vocab_size": 67, "num_hidden_layers": 6}[key]
    target = tiny.save_target(tmp_path / "other", **{key: other})
    text = build_refused(capsys, monkeypatch, (target, *pair[1:]))
    assert (
        key.replace("num_hidden", "num_target") in text
        and str(other) in text
        and str(tiny.SIZES[key]) in text
    )


@pytest.mark.parametrize("layer", [-1, 4, 5, 99])
def test_a_layer_id_out_of_range(capsys, monkeypatch, pair, layer):
    edit(pair[1], tapped_hidden_states=[1, layer])
    text = build_refused(capsys, monkeypatch, pair)
    assert f"a tap of hidden_states[{layer}]" in text and "0 to 3 can be tapped of a 4-layer target" in text


@pytest.mark.parametrize("mask", [-1, 61, 10**9])
def test_a_mask_token_outside_the_vocabulary(capsys, monkeypatch, pair, mask):
    edit(pair[1], mask_token_id=mask)
    words = (
        "mask_token_id is -1; at least 0"
        if mask < 0
        else f"mask_token_id {mask} is outside the vocabulary of 61"
    )
    assert words in build_refused(capsys, monkeypatch, pair)


@pytest.mark.parametrize(
    ("dialect", "key"),
    [
        *(
            ("ours", k)
            for k in ("mask_token_id", "tapped_hidden_states", "block_width", "num_target_layers", "causal")
        ),
        *(("zlab", k) for k in ("mask_token_id", "target_layer_ids", "block_size", "num_target_layers")),
    ],
)
def test_a_missing_key_is_never_guessed(capsys, monkeypatch, pair, key, dialect):
    file = pair[1] / "config.json"
    config = json.loads(file.read_text()) if dialect == "ours" else tiny.zlab(pair[1])
    config.pop(key, None)
    config.get("dflash_config", {}).pop(key, None)
    file.write_text(json.dumps(config))
    text = build_refused(capsys, monkeypatch, pair)
    assert key in text and "nothing is guessed" in text


def test_a_key_with_two_values(capsys, monkeypatch, pair):
    config = tiny.zlab(pair[1]) | {"block_size": 16}
    (pair[1] / "config.json").write_text(json.dumps(config))
    assert "dflash_config.block_size is 4 but block_size is 16" in build_refused(capsys, monkeypatch, pair)


def test_a_key_that_would_change_the_numbers_is_not_ignored(capsys, monkeypatch, pair):
    config = tiny.zlab(pair[1])
    config["dflash_config"]["attention_temperature"] = 0.5
    (pair[1] / "config.json").write_text(json.dumps(config))
    assert "dflash_config.attention_temperature = 0.5 is not a key" in build_refused(
        capsys, monkeypatch, pair
    )


def test_a_misspelt_key(capsys, monkeypatch, pair):
    edit(pair[1], depth_mixin="shift")
    assert "the key depth_mixin is not one of" in build_refused(capsys, monkeypatch, pair)


def test_a_draft_of_another_family(capsys, monkeypatch, pair):
    config = tiny.zlab(pair[1]) | {"lilicorr_layers": 2}
    (pair[1] / "config.json").write_text(json.dumps(config))
    assert "describes a LiLiCorr draft" in build_refused(capsys, monkeypatch, pair)


@pytest.mark.parametrize("value", ["eight", 2.5, [8], True])
def test_a_value_of_the_wrong_type(capsys, monkeypatch, pair, value):
    edit(pair[1], block_width=value)
    assert "block_width is" in build_refused(capsys, monkeypatch, pair)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rms_norm_eps", "x", "rms_norm_eps is 'x'; a number was expected"),
        ("rms_norm_eps", -1, "a number above 0 was expected"),
        ("output_multiplier", [], "output_multiplier is []"),
        ("attention_bias", "no", "attention_bias is 'no'"),
        ("windows", [0, None], "windows has 0"),
        ("windows", ["a", None], "windows is ['a', None]; a list of whole numbers"),
        ("causal", ["yes", "no"], "causal is ['yes', 'no']"),
        ("head_dim", 7, "head_dim 7 is odd"),
        ("hidden_act", 3, "hidden_act is 3; a word was expected"),
        ("hidden_act", "swoosh", "hidden_act 'swoosh' is not an activation"),
        ("num_hidden_layers", 50, "causal has 2 entries for 50 layers"),
        ("rope_parameters", {"rope_type": "weird"}, "is not a rotary embedding"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "factor"),
        ("tapped_hidden_states", ["1"], "a list of whole numbers was expected"),
        ("tapped_hidden_states", 7, "a list was expected"),
        ("attention_value_scale", "half", "attention_value_scale is 'half'; a number was expected"),
        ("head", "oracle", "head is 'oracle'; one of independent"),
        ("head", "selector", "lacks head_rank, which selector needs"),
        ("depth_mixing", "convolution", "lacks conv_kernel_size"),
        ("draft_vocab_size", 20, "holds no lm_head.weight of its own"),
        ("own_head", True, "own_head is True, but the tensor is not there"),
    ],
)
def test_values_that_cannot_be(capsys, monkeypatch, pair, key, value, words):
    edit(pair[1], **{key: value})
    assert words in build_refused(capsys, monkeypatch, pair)


def test_a_shard_that_is_not_there(capsys, monkeypatch, pair):
    index = {"weight_map": {"norm.weight": "model-00001-of-00002.safetensors"}}
    (pair[1] / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is missing, though model.safetensors.index.json lists it" in build_refused(
        capsys, monkeypatch, pair
    )


def test_weights_that_are_not_floating_point(capsys, monkeypatch, pair):
    edit_tensors(pair[1], lambda state: state.update({"norm.weight": torch.ones(32, dtype=torch.int64)}))
    assert "norm.weight holds torch.int64" in build_refused(capsys, monkeypatch, pair)


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_tensor(capsys, monkeypatch, pair, which):
    name = "model.norm.weight" if which == 0 else "norm.weight"
    edit_tensors(pair[which], lambda state: state.pop(name))
    text = build_refused(capsys, monkeypatch, pair)
    assert "lacks the tensor" in text and name in text


@pytest.mark.parametrize("which", [0, 1])
def test_a_tensor_left_over(capsys, monkeypatch, pair, which):
    edit_tensors(pair[which], lambda state: state.update({"layers.0.extra": torch.zeros(3)}))
    text = build_refused(capsys, monkeypatch, pair)
    assert "holds" in text and "layers.0.extra" in text


@pytest.mark.parametrize("which", [0, 1])
def test_a_tensor_of_another_shape(capsys, monkeypatch, pair, which):
    name = "model.norm.weight" if which == 0 else "norm.weight"
    edit_tensors(pair[which], lambda state: state.update({name: torch.zeros(5)}))
    assert name in build_refused(capsys, monkeypatch, pair)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--block-width", 1], "leaves no row to propose with"),
        (["--max-seq-len", 3], "cannot hold one block of 4 rows"),
        (["--max-seq-len", 257], "more than the 256 positions"),
        (["--max-batch-size", 0], "is not a batch"),
        (["--dtype", "bfloat16"], "choose one of: float32, float16"),
        (["--backend", "tpu"], "choose one of: onnxruntime"),
    ],
)
def test_limits(capsys, monkeypatch, pair, flags, words):
    assert words in build_refused(capsys, monkeypatch, pair, *flags)


def test_a_full_disk_is_noticed_before_the_work(capsys, monkeypatch, pair):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    assert "free some space" in build_refused(capsys, monkeypatch, pair)


def test_a_disk_that_fills_up_while_writing(capsys, monkeypatch, pair):
    from speccompile.compiler import build

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "externalise", full)
    assert "No space left on device" in build_refused(capsys, monkeypatch, pair)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_build_leaves_no_engine_and_the_next_one_cleans_up(pair, signum):
    target, draft, out = pair
    command = [
        sys.executable,
        "-m",
        "speccompile.compiler.cli",
        "build",
        "--target",
        target,
        "--draft",
        draft,
        "--out",
        out,
    ]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    leftover = lambda: [p for p in out.parent.iterdir() if "building" in p.name]  # noqa: E731
    deadline = time.time() + 120
    while not leftover() and time.time() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signum)
    assert process.wait() in (128 + signum, -signum)
    assert not out.exists()
    if signum != signal.SIGKILL:
        assert not leftover()
    built(pair)
    assert out.is_dir() and not leftover()


def built(pair):
    from speccompile.compiler.build import BuildOptions, build

    build(BuildOptions(str(pair[0]), str(pair[1]), pair[2], max_seq_len=64))
    return pair[2]


def test_force_replaces_an_engine_and_nothing_else(capsys, monkeypatch, pair):
    built(pair)
    assert "already exists; give --force" in build_refused(capsys, monkeypatch, pair)
    pair[2].rename(pair[2].with_name("kept"))
    pair[2].mkdir()
    (pair[2] / "thesis.tex").write_text("years of work")
    assert "--force will not replace it" in build_refused(capsys, monkeypatch, pair, "--force")
    assert (pair[2] / "thesis.tex").exists()


def test_an_engine_that_appears_meanwhile_is_not_overwritten(tmp_path):
    from speccompile.export.directory import atomic_directory
    from speccompile.export.errors import UserError

    with pytest.raises(UserError, match="already exists"):
        with atomic_directory(tmp_path / "engine", replace=False):
            (tmp_path / "engine").mkdir()
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]


def test_a_build_killed_while_replacing_gives_the_old_engine_back(tmp_path):
    from speccompile.export.directory import atomic_directory

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    old = tmp_path / f".engine.building-{dead.pid}-0123-old"
    old.mkdir()
    (old / "manifest.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        with atomic_directory(tmp_path / "engine", replace=True):
            raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]
    assert (tmp_path / "engine" / "manifest.json").exists()


def test_damaged_engines(capsys, monkeypatch, pair):
    engine = built(pair)
    run = ("run", engine, "--prompt-ids", "1,2,3")
    weights = engine / "rank0.weights"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert "rank0.weights has" in refused(capsys, monkeypatch, *run)
    weights.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert "does not match its SHA-256" in refused(capsys, monkeypatch, *run)
    weights.unlink()
    assert "rank0.weights is missing" in refused(capsys, monkeypatch, "inspect", engine)
    (engine / "manifest.json").write_text("[]")
    assert "an object was expected" in refused(capsys, monkeypatch, "verify", engine)
    assert "is not a directory" in refused(capsys, monkeypatch, "run", engine / "none", "--prompt", "x")


def test_run_options_that_contradict(capsys, monkeypatch, pair):
    engine = built(pair)
    for flags, words in (
        ([], "Give one of --prompt TEXT"),
        (["--prompt", "a", "--prompt-ids", "1"], "Give one of"),
        (["--prompt-ids", "1,b"], "is not a list of whole numbers"),
        (["--prompt-ids", "1,99"], "outside the vocabulary"),
        (["--prompt", "text"], "holds no tokenizer"),
        (["--prompt-ids", "1", "--max-new-tokens", "0"], "at least 1"),
        (["--prompt-ids", "1", "--json", "--stream"], "--json prints one object"),
    ):
        assert words in refused(capsys, monkeypatch, "run", engine, *flags)


def test_inspect_refuses_an_unknown_graph_format(capsys, monkeypatch, pair):
    assert ".html, .txt or .onnx was expected" in refused(
        capsys, monkeypatch, "inspect", built(pair), "--graph", "graph.pdf"
    )
