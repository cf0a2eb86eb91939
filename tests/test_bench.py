"""`bench`: the figures follow from what was generated, the prompts are the user's, and a server is measured by the same rules."""

import csv
import json
import subprocess
import sys

import pytest
from serving import serving
from shell import speccompile

from speccompile.export.errors import UserError
from speccompile.runtime import Engine, SamplingParams
from speccompile.runtime.bench import BenchOptions, Run, Setting, _positions, _row, bench
from speccompile.runtime.prompts import load_prompts


@pytest.fixture(scope="module")
def engine(tiny_engine):
    return Engine.load(tiny_engine, threads=1)


def test_the_report_follows_from_the_generations(engine):
    prompts = [engine.tokenizer.encode(text) for text in ("def f(", "The while", "a b c")]
    params = SamplingParams(24, ignore_eos=True)
    said = []
    report = bench(engine, prompts, BenchOptions((1, 2), (None, 3), params, repeats=2), said.append)
    assert [(r["mode"], r["batch"], r["block_width"]) for r in report["rows"]] == [
        (mode, batch, width) for batch in (1, 2) for mode, width in (("plain", None), ("speculation", None), ("speculation", 3))
    ]  # fmt: skip
    results = engine.generate(prompts, params)
    lengths = [n for r in results for n in r.acceptance_lengths[:-1]]
    for row in report["rows"]:
        assert row["output_tokens"] == 3 * 24
        spread = row["output_tokens_per_s"]
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
        assert 0 < row["time_to_first_token_s"]["p50"] <= row["time_to_first_token_s"]["p99"]
        if row["mode"] == "plain":
            assert "speedup" not in row and row["acceptance_length"] is None
        else:
            assert row["speedup"]["min"] <= row["speedup"]["median"] and row["texts_that_differ"] == 0
        if (row["mode"], row["block_width"]) == ("speculation", None):
            assert row["acceptance_length"] == pytest.approx(sum(lengths) / len(lengths))
            assert 1 + sum(row["accepted_at_position"]) == pytest.approx(row["acceptance_length"])
        if row["block_width"] == 3:
            assert row["acceptance_length"] <= 3 and len(row["accepted_at_position"]) <= 2
    order = [what.split(", ")[0] for what in said if "batch 2, run" in what]
    assert order == ["plain", "speculation", "speculation"] * 2  # interleaved


def test_figures_of_a_known_run():
    runs = [
        Run(2.0, 100, [0.1, 0.3], [0.01, 0.03], [1, 3, 2, 2], [[1], [2]]),
        Run(4.0, 100, [0.2], [0.02], [9], [[1], [2]]),
    ]
    plain = [Run(4.0, 100, [0.1], [0.04], [], [[1], [3]]), Run(10.0, 100, [0.1], [0.1], [], [[1], [3]])]
    row = _row(Setting("speculation", 2), runs, plain)
    assert row["output_tokens_per_s"] == {"median": 37.5, "min": 25.0, "max": 50.0}
    assert row["speedup"] == {"median": 2.25, "min": 2.0, "max": 2.5} and row["texts_that_differ"] == 1
    assert row["acceptance_length"] == 2.0 and row["accepted_at_position"] == [0.75, 0.25]
    assert row["time_to_first_token_s"]["p50"] == pytest.approx(0.2)
    assert _positions([]) == [] and _positions([1, 1]) == []


def test_a_server_is_measured_on_the_same_prompts(engine, tiny_engine):
    prompts = [[5, 6, 7], [8] * 20, [9]]
    with serving(tiny_engine) as (url, _):
        options = BenchOptions((2,), params=SamplingParams(12, ignore_eos=True), repeats=1, against=url)
        row = bench(engine, prompts, options)["rows"][-1]
        assert row["mode"] == "server" and row["output_tokens"] == 36 and row["speedup"]["median"] > 0
        with pytest.raises(UserError, match="answered 404: .*gpt-5"):
            bench(engine, prompts, BenchOptions(repeats=1, against=url, against_model="gpt-5"))
    with pytest.raises(UserError, match="did not answer as an OpenAI-compatible server"):
        bench(engine, prompts, BenchOptions(repeats=1, against=url))


CHAT = [{"role": "user", "content": "hello"}]


def test_prompts_in_every_form(engine, tmp_path):
    def ids(name, content):
        (tmp_path / name).write_text(content)
        return load_prompts(tmp_path / name, engine)

    text = engine.tokenizer.encode("hello")
    chat = engine.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    lines = [
        {"prompt": "hello"},
        {"prompt": [1, 2]},
        {"messages": CHAT},
        {"custom_id": "a", "body": {"messages": CHAT}},
    ]
    assert ids("a.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n") == [text, [1, 2], chat, chat]
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
    assert ids("sharegpt.json", json.dumps([{"id": "x", "conversations": turns}])) == [chat]
    assert ids("plain.txt", "hello\n\nhello\n") == [text, text]
    assert ids("list.json", json.dumps(["hello"])) == [text]
    assert load_prompts(tmp_path / "a.jsonl", engine, 2) == [text, [1, 2]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", "{}\n", "a.jsonl, entry 1 has none of prompt, messages"),
        ("a.jsonl", '{"prompt": "a"}\n{nonsense\n', "a.jsonl, line 2, is not JSON"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "entry 1 has none"),
        ("a.jsonl", "", "holds no prompt of 1 to 256 tokens"),
        ("a.txt", "word " * 500, "holds no prompt of 1 to 256 tokens"),
        ("b.jsonl", None, "cannot be read"),
    ],
)
def test_prompts_that_cannot_be_read(engine, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        load_prompts(tmp_path / name, engine)


def test_the_command(tiny_engine, tmp_path):
    options = "--limit", 2, "--max-new-tokens", 8, "--repeats", 1, "--csv", tmp_path / "table.csv"
    done = speccompile("bench", tiny_engine, *options)
    for words in ("2 prompts", "× plain", "acceptance", "accepted at proposal 1", "cache per sequence"):
        assert words in " ".join(done.stdout.split())
    table = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [row["mode"] for row in table] == ["plain", "speculation"] and float(
        table[1]["speedup_median"]
    ) > 0
    assert json.loads(speccompile("bench", tiny_engine, *options[:6], "--json").stdout)["prompts"] == 2
    for more, words in (
        (("--batch", "9"), "--batch 9 is not from 1 to the 4 sequences"),
        (("--block-width", "99"), "--block-width 99 is not from 1"),
        (("--repeats", "0"), "--repeats is 0"),
        (("--batch", "x"), "not a list of whole numbers"),
    ):
        assert words in " ".join(speccompile("bench", tiny_engine, *more, code=2).stderr.split())


def test_it_runs_without_torch(tiny_engine):
    code = "import sys; sys.modules['torch'] = None; from speccompile.compiler.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "bench",
        tiny_engine,
        "--limit",
        "1",
        "--max-new-tokens",
        "4",
        "--repeats",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
