"""`port`: launches in every form people keep them in, every speculative flag of SGLang's, and commands that run."""

import ast
import importlib.util
import json
import shlex
from pathlib import Path

import pytest
import tiny
from shell import speccompile

from speccompile.compiler.port import sglang
from speccompile.compiler.port.launch import find_launch
from speccompile.compiler.port.port import as_json, port
from speccompile.export.errors import UserError

SGLANG = "python -m sglang.launch_server --model-path T --speculative-algorithm DFLASH --speculative-draft-model-path D"


def ported(launch):
    return as_json(port(find_launch(launch), "torch", "out"), "out")


def outcomes(described):
    return {line["flag"]: (line["outcome"], line["note"]) for line in described["flags"]}


def test_a_launch_becomes_commands():
    described = ported(
        f"CUDA_VISIBLE_DEVICES=0 {SGLANG} --speculative-num-draft-tokens=16 --dtype half --context-length 8192 --max-running-requests 32 "
        "--tp 1 --mem-fraction-static 0.8 --port 30000 --served-model-name q --api-key sk-secret --enable-new-thing --trust-remote-code > log 2>&1 &"
    )
    assert described["build"] == (
        "speccompile build --target T --draft D --block-width 16 --dtype float16 --max-seq-len 8192 --max-batch-size 32 --trust-remote-code "
        "--sampling --backend torch --out out"
    )
    assert described["serve"] == "speccompile serve out --port 30000 --model-name q"
    found = outcomes(described)
    assert found["tp-size"][0] == "not needed" and found["mem-fraction-static"][0] == "changed"
    assert found["enable-new-thing"][0] == "unknown" and described["environment"] == ["SPECCOMPILE_API_KEY"]
    assert "sk-secret" not in json.dumps(described)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.sh", f"#!/bin/sh\nset -e\n# {SGLANG.replace('DFLASH', 'UNO')}\nexec {SGLANG} \\\n  --speculative-num-draft-tokens 8 \\\n  --port 1\n"),
        ("Dockerfile", f"FROM lmsysorg/sglang\nCMD {json.dumps([*SGLANG.split(), '--speculative-num-draft-tokens', '8', '--port', '1'])}\n"),
        ("Dockerfile2", f"FROM x\nENTRYPOINT {SGLANG} --speculative-num-draft-tokens 8 --port 1\n"),
        ("k8s.yaml", f"""
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
      - name: other
        command: ["sleep", "1"]
      - name: sglang
        command: [python, -m, sglang.launch_server]
        args: {json.dumps([*SGLANG.split()[3:], "--speculative-num-draft-tokens", "8", "--port", "1"])}
---
kind: Service
"""),
        ("k8s-shell.yaml", f"spec:\n  containers:\n  - command: [/bin/bash, -c]\n    args: ['ulimit -n 1; {SGLANG} --speculative-num-draft-tokens 8 --port 1']\n"),
        ("compose.yaml", f"services:\n  llm:\n    image: x\n    command: >\n      {SGLANG}\n      --speculative-num-draft-tokens 8 --port 1\n"),
        ("config.yaml", "model-path: T\nspeculative_algorithm: DFLASH\nspeculative-draft-model-path: D\nspeculative-num-draft-tokens: 8\nport: 1\nenable-metrics: true\ndisable-radix-cache: false\n"),
    ],
)  # fmt: skip
def test_every_form_a_launch_is_kept_in(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    described = ported(str(tmp_path / name))
    assert described["build"].startswith("speccompile build --target T --draft D --block-width 8 ")
    assert described["serve"] == "speccompile serve out --port 1"


def test_widths_are_counted_as_each_counts_them():
    def width(launch):
        words = shlex.split(ported(launch)["build"])
        return int(words[words.index("--block-width") + 1])

    assert width(f"{SGLANG} --speculative-dflash-block-size 16") == 16
    assert width(SGLANG.replace("DFLASH", "DSPARK") + " --speculative-dspark-block-size 7") == 8
    assert (
        width(
            SGLANG.replace("DFLASH", "EAGLE3")
            + " --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
        )
        == 4
    )
    config = {"method": "dflash", "model": "D", "num_speculative_tokens": 7}
    assert width(f"vllm serve T --speculative-config '{json.dumps(config)}' --max-num-seqs 4") == 8
    assert (
        width(
            f"python -m vllm.entrypoints.openai.api_server --model T --speculative_config='{json.dumps(config)}'"
        )
        == 8
    )


def test_tensorrt_llms_yaml(tmp_path):
    (tmp_path / "extra.yaml").write_text(
        "model: T\nmax_batch_size: 4\nkv_cache_config:\n  free_gpu_memory_fraction: 0.8\n"
        "speculative_config:\n  decoding_type: DFlash\n  max_draft_len: 15\n  speculative_model: D\n  mask_token_id: 5\n"
    )
    described = ported(str(tmp_path / "extra.yaml"))
    assert (
        described["build"]
        == "speccompile build --target T --draft D --block-width 16 --max-batch-size 4 --sampling --backend torch --out out"
    )
    assert outcomes(described)["kv-cache-config"][0] == "changed"


def test_a_tree_becomes_a_chain_and_says_so():
    described = ported(
        SGLANG.replace("DFLASH", "EAGLE3")
        + " --speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 32"
    )
    assert "--block-width 6" in described["build"]
    assert (
        outcomes(described)["speculative-eagle-topk"][0]
        == outcomes(described)["speculative-num-draft-tokens"][0]
        == "changed"
    )
    assert any("becomes a chain" in warning for warning in described["warnings"])


def test_every_speculative_flag_of_sglang_has_a_rule():
    """Read from the wheel of the version the table is for."""
    package = importlib.util.find_spec("sglang")
    if package is None:
        pytest.skip("sglang is not installed")  # the test command installs it
    source = Path(package.submodule_search_locations[0]) / "srt/arg_groups/fields/spec.py"
    (cls,) = (n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef))
    names = [
        n.target.id
        for n in cls.body
        if isinstance(n, ast.AnnAssign) and "no_cli=True" not in ast.unparse(n.annotation)
    ]
    flags = {name.replace("_", "-") for name in names if not name.startswith("_")}
    assert len(flags) > 35 and flags - set(sglang.RULES) == set()


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (f"{SGLANG} --speculative-accept-threshold-single 0.9", "accepts tokens that the target would not have chosen"),
        (SGLANG.replace("DFLASH", "NGRAM"), "--speculative-algorithm NGRAM has no counterpart; DFLASH, DSPARK, EAGLE3 have"),
        ("python -m sglang.launch_server --model-path T", "has no --speculative-algorithm"),
        (f"{SGLANG} --speculative-dflash-block-size 8 --speculative-num-draft-tokens 16", "are one number and say 16 and 8"),
        (f"{SGLANG.replace('DFLASH', 'DSPARK')} --speculative-dspark-block-size x", "speculative-dspark-block-size is 'x', which is not the number"),
        ("vllm serve T", "no speculative-config"),
        ("vllm serve T --speculative-config '{\"method\": \"ngram\"}'", "The speculation 'ngram' has no counterpart"),
        ("vllm serve T --speculative-config '{oops'", "is not JSON"),
        ("echo hello", "holds no launch of sglang.launch_server"),
        ("nowhere.sh", "is neither a file nor a command line"),
        (f"{SGLANG}\n{SGLANG}", "holds 2 launches"),
        ("sglang serve 'unbalanced", "cannot be read as a command"),
    ],
)  # fmt: skip
def test_what_cannot_be_ported_is_refused(launch, words):
    with pytest.raises(UserError, match=words):
        ported(launch)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "a.yaml").write_text("a: [1\n")
    (tmp_path / "b.sh").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not YAML"):
        find_launch(str(tmp_path / "a.yaml"))
    with pytest.raises(UserError, match="cannot be read as text"):
        find_launch(str(tmp_path / "b.sh"))


def test_checkpoints_at_hand_are_checked_and_the_commands_run(tmp_path):
    target = tiny.save_target(tmp_path / "target")
    draft = tiny.save_draft(tmp_path / "draft", target, **tiny.FAMILIES["causal-depth"])
    launch = f"sglang serve --model {target} --speculative-algorithm DFLASH --speculative-draft-model {draft} --context-length 64 --dtype float32"
    said = speccompile("port", launch, "--out", tmp_path / "engine", "--json").stdout
    described = json.loads(said)
    assert not described["warnings"] and any(
        "the draft is causal-depth, trained at 4 rows" in n for n in described["notes"]
    )
    speccompile(*shlex.split(described["build"])[1:])
    assert (tmp_path / "engine" / "manifest.json").exists()
    text = " ".join(speccompile("port", launch).stdout.split())
    assert "speccompile verify engines/ported" in text and "not needed" not in text
    wrong = tiny.save_target(tmp_path / "wrong", hidden_size=64)
    described = ported(launch.replace(str(target), str(wrong)))
    assert any("`build` would refuse this pair" in warning for warning in described["warnings"])
