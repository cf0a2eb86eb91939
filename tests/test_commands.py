"""The commands as a shell runs them, on tiny engines."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny
from builder import eager_greedy
from shell import speccompile

from speccompile.compiler.build import BuildOptions, build
from speccompile.runtime import Engine

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "command",
    [[], ["build"], ["init-draft"], ["drafts"], ["convert-draft"], ["run"], ["verify"], ["inspect"]],
)
def test_help_teaches(command):
    text = speccompile(*command, "--help").stdout
    assert "Usage" in text and len(text) > 400


def test_help_states_the_defaults():
    text = " ".join(speccompile("build", "--help", env={"COLUMNS": "200"}).stdout.split())
    for words in (
        "[default: as the draft was trained]",
        "[default: the target's, at most 2048]",
        "[default: all]",
    ):
        assert words in text


def test_init_draft_build_run_verify_inspect(tmp_path):
    target = tiny.save_target(tmp_path / "target")
    for family in ("dflash", "causal-depth"):
        said = speccompile(
            "init-draft",
            "--target",
            target,
            "--out",
            tmp_path / family,
            "--family",
            family,
            "--block-width",
            4,
        ).stdout
        assert f"random {family} draft" in said and "mask token 60" in said
        engine = tmp_path / f"engine-{family}"
        built = speccompile(
            "build", "--target", target, "--draft", tmp_path / family, "--out", engine, "--max-seq-len", 64
        ).stdout
        for words in (
            "trace target",
            "lower_group_query_attention",
            "rank0.weights",
            "Cache per sequence",
            f"{family}, read as speccompile",
        ):
            assert words in built
        answer = json.loads(
            speccompile("run", engine, "--prompt-ids", "1,2,3", "--max-new-tokens", 9, "--json").stdout
        )
        plain = json.loads(
            speccompile(
                "run", engine, "--prompt-ids", "1,2,3", "--max-new-tokens", 9, "--json", "--no-speculation"
            ).stdout
        )
        assert answer["token_ids"] == plain["token_ids"] and len(answer["token_ids"]) == 9
        assert set(answer["timings"]) == {"prefill_s", "decode_s", "tokens_per_s"}
        assert plain["acceptance_lengths"] == [1] * 8
        streamed = speccompile(
            "run", engine, "--prompt-ids", "1,2,3", "--max-new-tokens", 9, "--stream"
        ).stdout
        assert streamed.strip().strip(",") == ",".join(map(str, answer["token_ids"]))
        verdict = json.loads(speccompile("verify", engine, "-n", 3, "--max-new-tokens", 12, "--json").stdout)
        assert verdict["identical"] and verdict["tokens"] == 36
        assert "identical: 36 tokens" in speccompile("verify", engine, "-n", 3, "--max-new-tokens", 12).stdout


def test_drafts_lists_every_format():
    rows = json.loads(speccompile("drafts", "--json").stdout)
    assert {row["format"] for row in rows} >= {"speccompile", "z-lab DFlash", "speculators dspark", "EAGLE-3"}
    assert all(row["families"] and row["recognised_by"] for row in rows)
    text = speccompile("drafts", env={"COLUMNS": "60"}).stdout
    for row in rows:
        assert row["format"].split()[-1] in text


def test_convert_draft_gives_the_same_engine(tmp_path):
    target = tiny.save_target(tmp_path / "target")
    draft = tiny.save_draft(tmp_path / "draft", target)
    (draft / "config.json").write_text(json.dumps(tiny.zlab(draft)))
    done = speccompile("convert-draft", draft, "--target", target, "--out", tmp_path / "ours", "--json")
    said = json.loads(done.stdout)
    assert said["family"] == "dflash" and said["tapped_hidden_states"] and said["block_width"] == 4
    assert "already exists" in speccompile("convert-draft", draft, "--out", tmp_path / "ours", code=2).stderr
    printed = speccompile("convert-draft", draft, "--out", tmp_path / "ours", "--force").stdout
    assert "dflash, read as z-lab DFlash" in printed and "Written to" in printed
    answers = []
    for name in ("draft", "ours"):
        build(BuildOptions(str(target), str(tmp_path / name), tmp_path / f"e-{name}", max_seq_len=64))
        answers.append(Engine.load(tmp_path / f"e-{name}", threads=1).generate([[1, 2, 3]], 20)[0].proposals)
    assert answers[0] == answers[1]


def test_convert_draft_refuses_another_target(tmp_path):
    target = tiny.save_target(tmp_path / "target")
    other = tiny.save_target(tmp_path / "other", num_hidden_layers=6)
    draft = tiny.save_draft(tmp_path / "draft", target)
    done = speccompile("convert-draft", draft, "--target", other, "--out", tmp_path / "ours", code=2)
    assert "num_target_layers 4, but this target has 6" in done.stderr
    assert not (tmp_path / "ours").exists()


def test_a_full_cache_ends_with_a_message(pairs):
    path = pairs(draft={"family": "dflash"}).engine.directory.path
    done = speccompile("run", path, "--prompt-ids", ",".join(["3"] * 60), "--max-new-tokens", 50)
    assert "the cache is full at 64 tokens" in done.stderr


def test_verify_finds_a_wrong_engine(pairs, tmp_path):
    """The engine against another target's weights: a failure, its place and both logits."""
    other = tiny.save_target(tmp_path / "other", seed=7)
    path = pairs(draft={"family": "dflash"}).engine.directory.path
    done = speccompile("verify", path, "--target", other, "-n", 1, "--max-new-tokens", 8, code=1)
    assert re.search(
        r"DIFFERENT: prompt 0, position \d+, against eager: the engine chose \d+ \(logit", done.stdout
    )
    verdict = json.loads(speccompile("verify", path, "--target", other, "-n", 1, "--json", code=1).stdout)
    assert not verdict["passed"] and verdict["differences"][0]["position"] >= 0


def test_verify_calls_a_near_tie_by_its_name(pairs, tmp_path):
    path = pairs(draft={"family": "dflash"}).engine.directory.path
    other = tiny.save_target(tmp_path / "other", seed=7)
    done = speccompile(
        "verify", path, "--target", other, "-n", 1, "--max-new-tokens", 8, "--tie-tolerance", "100"
    )
    assert "near tie: prompt 0" in done.stdout and "DIFFERENT" not in done.stdout


def test_verify_reads_prompts_of_both_kinds(pairs, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [1, 2]}\n\n{"prompt_ids": [3]}\n')
    path = pairs(draft={"family": "dflash"}).engine.directory.path
    assert (
        json.loads(speccompile("verify", path, "--prompts", file, "--max-new-tokens", 4, "--json").stdout)[
            "prompts"
        ]
        == 2
    )
    file.write_text('{"prompt": 3}\n')
    assert "line 1, has neither" in speccompile("verify", path, "--prompts", file, code=2).stderr


def test_inspect_describes_the_contract(pairs, tmp_path):
    pair = pairs(draft={"family": "causal-depth"})
    path = pair.engine.directory.path
    d = json.loads(speccompile("inspect", path, "--json").stdout)
    shapes = {t["name"]: t["shape"] for t in d["inputs"]}
    assert list(shapes)[:4] == ["tokens", "num_tokens", "num_known", "lengths"]
    assert shapes["target.3.value"] == ["batch", 2, 64 + 2 * 4, 8]
    outputs = {t["name"]: t for t in d["outputs"]}
    assert list(outputs)[:4] == ["emitted", "num_emitted", "new_lengths", "block"]
    assert outputs["draft.1.key.out"]["bound_to"] == "draft.1.key"
    assert d["operations"]["rank0.onnx"]["com.microsoft::GroupQueryAttention"] == 4 + 2
    assert d["operations"]["rank0.plain.onnx"]["com.microsoft::GroupQueryAttention"] == 4
    one, eight, _ = d["memory"]
    assert one["target_caches"] == 2 * 4 * 2 * 72 * 8 * 4 and eight["draft_caches"] == 8 * one["draft_caches"]
    text = speccompile("inspect", path, env={"COLUMNS": "200"}).stdout
    for words in ("causal-depth draft", "Step contract", "GroupQueryAttention", "fuse_projections", "total"):
        assert words in text
    for name in ("graph.html", "graph.txt", "graph.onnx"):
        speccompile("inspect", path, "--graph", tmp_path / name, "--json")
    assert "GroupQueryAttention" in (tmp_path / "graph.html").read_text()
    assert len((tmp_path / "graph.txt").read_text().splitlines()) == len(
        onnx.load(tmp_path / "graph.onnx", load_external_data=False).graph.node
    )


def test_one_copy_of_embedding_and_head_in_the_file(pairs):
    """Embedding and head are 2 x 4096 x 32 floats here, far more than everything else together."""
    pair = pairs(target={"vocab_size": 4096}, draft={"family": "dflash"})
    own = sum(
        p.numel() * 4
        for p in (
            *pair.target.parameters(),
            *(q for n, q in pair.draft.named_parameters() if n not in ("embedding", "head")),
        )
    )
    assert pair.report["bytes"]["rank0.weights"] < own * 1.1


def test_caches_are_written_in_place(pairs):
    """After a step the very buffers that were bound hold the new rows, and no others changed."""
    pair = pairs(draft={"family": "dflash"})
    session = pair.engine.session(2)
    before = {name: cache.numpy().copy() for name, cache in session.caches.items()}
    pointers = {name: cache.data_ptr() for name, cache in session.caches.items()}
    tokens = np.array([[1, 2, 3], [4, 0, 0]])
    session.step(tokens, np.array([3, 1]), np.array([3, 1]), np.array([0, 10]), np.array([-1, -1]))
    for name, cache in session.caches.items():
        after = cache.numpy()
        assert cache.data_ptr() == pointers[name]
        assert np.any(after[0, :, :3] != before[name][0, :, :3])
        assert np.array_equal(after[1, :, :10], before[name][1, :, :10])
        assert np.array_equal(after[:, :, 40:], before[name][:, :, 40:])


def test_the_runtime_needs_no_torch(pairs):
    path = pairs(draft={"family": "dflash"}).engine.directory.path
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from speccompile.runtime import Engine\n"
        f"print(Engine.load({str(path)!r}).generate([[1, 2, 3]], 5)[0].token_ids)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == eager_greedy(pairs(draft={"family": "dflash"}).target, [1, 2, 3], 5)


def test_rooms_import_only_what_they_may():
    """compiler -> passes, export, runtime; passes and export -> plugins; runtime -> export, plugins."""
    may = {
        "compiler": {"passes", "plugins", "export", "runtime"}, "passes": {"plugins"}, "plugins": set(),
        "export": {"plugins"}, "runtime": {"export", "plugins"},
    }  # fmt: skip
    for room, allowed in may.items():
        for file in (ROOT / room).rglob("*.py"):
            found = set(
                re.findall(
                    r"speccompile\.(\w+)",
                    "\n".join(re.findall(r"^\s*(?:from|import) .*", file.read_text(), re.M)),
                )
            )
            assert found <= allowed | {room}, file
