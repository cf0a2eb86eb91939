"""The server, through OpenAI's own client and through what no client would send."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import serving
from shell import speccompile

from speccompile.runtime import Engine, SamplingParams

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

TEXT = 'The "while" statement is used for'


@pytest.fixture(scope="module")
def server(tiny_engine):
    with serving(tiny_engine) as (url, app):
        yield url, app


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def engine(tiny_engine):
    return Engine.load(tiny_engine, threads=1)


def idle(app):
    deadline = time.time() + 20
    while app.state.background.running or app.state.background.waiting:
        assert time.time() < deadline
        time.sleep(0.02)


def test_completions_are_the_engines(client, engine):
    expected = engine.generate([TEXT], 24)[0]
    done = client.completions.create(model="tiny", prompt=TEXT, max_tokens=24, temperature=0)
    assert done.choices[0].text == engine.tokenizer.decode(expected.token_ids)
    assert done.choices[0].finish_reason == "length" and done.object == "text_completion"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(expected.prompt), 24)
    ids = client.completions.create(model="tiny", prompt=expected.prompt, max_tokens=24, temperature=0)
    assert ids.choices[0].text == done.choices[0].text


def test_a_stream_is_the_whole_in_pieces(client):
    asked = dict(model="tiny", prompt=TEXT, max_tokens=40, temperature=0)
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert len(chunks) > 3 and [c.choices[0].finish_reason for c in chunks[:-1]][-2:] == [None, "length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 40
    assert {c.id for c in chunks} == {chunks[0].id}


def test_chat(client, engine):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "while?"}]},
    ]
    asked = dict(model="tiny", messages=messages, max_completion_tokens=16, temperature=0)
    whole = client.chat.completions.create(**asked)
    flat = [messages[0], {"role": "user", "content": "while?"}]
    ids = engine.tokenizer.apply_chat_template(flat, add_generation_prompt=True, return_dict=False)
    expected = engine.generate([ids], 16)[0]
    assert whole.choices[0].message.content == engine.tokenizer.decode(
        expected.token_ids, skip_special_tokens=True
    )
    assert whole.choices[0].message.role == "assistant" and whole.usage.prompt_tokens == len(ids)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content for c in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"


def test_seeds_choices_and_prompts(client, engine):
    asked = dict(model="tiny", prompt=[TEXT, "def "], max_tokens=12, temperature=1.0, top_p=0.95, seed=7, n=2)
    first, again = (client.completions.create(**asked) for _ in range(2))
    texts = [c.text for c in first.choices]
    assert texts == [c.text for c in again.choices] and [c.index for c in first.choices] == [0, 1, 2, 3]
    assert texts[0] != texts[1]
    tokens = engine.generate(["def "], SamplingParams(12, temperature=1.0, top_p=0.95, seed=8))[0].token_ids
    assert texts[3] == engine.tokenizer.decode(tokens, skip_special_tokens=True)
    assert first.usage.prompt_tokens == sum(len(engine.tokenizer.encode(p)) for p in asked["prompt"])
    other = client.completions.create(**asked | {"seed": 8})
    assert [c.text for c in other.choices] != texts


def test_temperature_is_1_unless_said_as_the_api_has_it(client):
    texts = {
        client.completions.create(model="tiny", prompt=TEXT, max_tokens=12).choices[0].text for _ in range(6)
    }
    assert len(texts) > 1


def test_stop_strings(client):
    asked = dict(model="tiny", prompt=TEXT, max_tokens=40, temperature=0)
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[9:12]
    cut = client.completions.create(**asked, stop=[stop, "never this"])
    assert cut.choices[0].text == whole[: whole.find(stop)] and cut.choices[0].finish_reason == "stop"
    chunks = client.completions.create(**asked, stop=stop, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == cut.choices[0].text
    assert cut.usage.completion_tokens < 40


def test_many_clients_at_once_get_what_each_would_alone(client, engine, server):
    prompts = [[(7 * i * j + i) % 900 for j in range(1 + 5 * i % 60)] for i in range(24)]
    with ThreadPoolExecutor(24) as pool:
        done = list(
            pool.map(
                lambda p: client.completions.create(model="tiny", prompt=p, max_tokens=16, temperature=0),
                prompts,
            )
        )
    expected = [engine.generate([p], 16)[0].token_ids for p in prompts]
    assert [d.choices[0].text for d in done] == [
        engine.tokenizer.decode(t, skip_special_tokens=True) for t in expected
    ]
    idle(server[1])


def test_models_health_and_metrics(client, server):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert httpx.get(f"{server[0]}/health").json() == {"status": "ok"}

    def read():
        lines = httpx.get(f"{server[0]}/metrics").text.splitlines()
        return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    before = read()
    done = client.completions.create(model="tiny", prompt=TEXT, max_tokens=20, temperature=0)
    after = read()
    change = {k: after[k] - before.get(k, 0) for k in after}
    assert change["speccompile_generation_tokens_total"] == 20
    assert change["speccompile_prompt_tokens_total"] == done.usage.prompt_tokens
    assert change["speccompile_acceptance_length_sum"] == 19  # the first token comes from the prompt
    assert change["speccompile_time_to_first_token_seconds_count"] == 1
    assert change["speccompile_time_per_output_token_seconds_count"] == 1
    assert after["speccompile_requests_running"] == after["speccompile_cache_usage_ratio"] == 0


def test_log_probabilities(client, engine):
    """Of the target's own softmax, whole and streamed, in both endpoints' forms."""
    asked = dict(model="tiny", prompt=TEXT, max_tokens=10, temperature=0)
    given = client.completions.create(**asked, logprobs=3).choices[0].logprobs
    result = engine.generate([TEXT], SamplingParams(10, logprobs=3))[0]
    assert given.token_logprobs == pytest.approx([e.logprob for e in result.logprobs], abs=1e-6)
    assert given.tokens == [engine.tokenizer.decode([t]) for t in result.token_ids]
    assert all(
        max(top.values()) == own for top, own in zip(given.top_logprobs, given.token_logprobs)
    )  # greedy
    assert given.text_offset == [len("".join(given.tokens[:i])) for i in range(10)]
    chunks = list(client.completions.create(**asked, logprobs=0, stream=True))
    assert [p for c in chunks for p in c.choices[0].logprobs.token_logprobs] == given.token_logprobs
    assert client.completions.create(**asked).choices[0].logprobs is None
    chat = dict(
        model="tiny",
        messages=[{"role": "user", "content": "while"}],
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
    )
    entries = client.chat.completions.create(**chat).choices[0].logprobs.content
    assert len(entries) == 5 and all(len(e.top_logprobs) == 2 and e.bytes for e in entries)


GOOD = {"model": "tiny", "prompt": "a", "max_tokens": 2}


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "words"),
    [
        ("completions", b"{not json", 400, "JSON"),
        ("completions", b"", 400, "body"),
        ("completions", b"[1]", 400, "valid dictionary"),
        ("completions", b"\xff\xfe", 400, ""),
        ("completions", GOOD | {"prompt": None}, 400, "prompt"),
        ("completions", GOOD | {"prompt": []}, 400, "no prompt"),
        ("completions", GOOD | {"prompt": ""}, 400, "has 0 tokens"),
        ("completions", GOOD | {"prompt": [5, 10**30]}, 400, "outside the vocabulary"),
        ("completions", GOOD | {"prompt": [-1]}, 400, "outside the vocabulary"),
        ("completions", GOOD | {"prompt": [1] * 257}, 400, "has 257 tokens; this engine takes at most 256"),
        ("completions", GOOD | {"max_tokens": 0}, 400, "max_tokens"),
        ("completions", GOOD | {"max_tokens": "many"}, 400, "max_tokens"),
        ("completions", GOOD | {"temperature": -1}, 400, "temperature"),
        ("completions", GOOD | {"top_p": 0}, 400, "top_p"),
        ("completions", GOOD | {"n": 1000}, 400, "n:"),
        ("completions", GOOD | {"seed": 10**40}, 400, "seed"),
        ("completions", GOOD | {"stop": ["a"] * 17}, 400, "at most 16"),
        ("completions", GOOD | {"stop": ""}, 400, "stop"),
        ("completions", GOOD | {"surprise": 1}, 400, "surprise: Extra inputs"),
        ("completions", GOOD | {"frequency_penalty": 0.5}, 400, "frequency_penalty is not supported"),
        ("completions", GOOD | {"logit_bias": {"5": 1}}, 400, "logit_bias is not supported"),
        ("completions", GOOD | {"logprobs": 21}, 400, "logprobs"),
        ("completions", GOOD | {"echo": True}, 400, "echo is not supported"),
        ("completions", GOOD | {"model": "gpt-5"}, 404, "The model 'gpt-5' does not exist"),
        ("completions", GOOD | {"prompt": ["a"] * 300}, 400, "at most 256 can wait"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "a"}]}, 400, "role"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "only text"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools is not"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}, 400, "response_format"),
        ("nothing", {}, 404, "Not Found"),
    ],
)  # fmt: skip
def test_bad_requests_get_openai_style_errors(server, endpoint, body, status, words):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(
        f"{server[0]}/v1/{endpoint}", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}
    assert httpx.get(f"{server[0]}/health").status_code == 200


def test_what_means_nothing_is_taken(client):
    done = client.completions.create(
        model="tiny", prompt="a", max_tokens=2, presence_penalty=0, frequency_penalty=0, logit_bias={}, user="me",
        best_of=1, echo=False, extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "repetition_penalty": 1.0},
    )  # fmt: skip
    assert done.choices[0].finish_reason == "length"


def test_limits_and_keys(tiny_engine):
    with serving(tiny_engine, api_key="secret", max_body_bytes=1000) as (url, _):
        good = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        assert good.completions.create(model="tiny", prompt="a", max_tokens=1).choices
        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            openai.OpenAI(base_url=f"{url}/v1", api_key="other", max_retries=0).models.list()
        assert (
            httpx.get(f"{url}/metrics").status_code == 401 and httpx.get(f"{url}/health").status_code == 200
        )
        with pytest.raises(openai.APIStatusError, match="over 1000 bytes") as caught:
            good.completions.create(model="tiny", prompt="a" * 1000)
        assert caught.value.status_code == 413


class Slow:
    """A session whose steps take as long as a test needs."""

    def __init__(self, session, seconds):
        self.session, self.seconds = session, seconds

    def __getattr__(self, name):
        return getattr(self.session, name)

    def step(self, *arguments):
        time.sleep(self.seconds)
        return self.session.step(*arguments)


def test_a_full_queue_and_a_deadline(tiny_engine):
    with serving(tiny_engine, max_waiting=2, request_timeout_s=1.0) as (url, app):
        scheduler = app.state.background.scheduler
        scheduler.session = Slow(scheduler.session, 0.1)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)

        def ask(index):
            try:
                return client.completions.create(
                    model="tiny",
                    prompt=[5, index],
                    max_tokens=200,
                    extra_body={"ignore_eos": True},
                    temperature=1,
                )
            except openai.APIStatusError as error:
                return error.status_code

        with ThreadPoolExecutor(12) as pool:
            results = list(pool.map(ask, range(12)))
        assert set(results) <= {429, 504} and results.count(429) >= 3 and results.count(504) >= 4
        idle(app)  # what timed out left its slot
        scheduler.session.seconds = 0
        assert client.completions.create(model="tiny", prompt=[5], max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_frees_its_slot(tiny_engine, stream):
    with serving(tiny_engine) as (url, app):
        scheduler = app.state.background.scheduler
        scheduler.session = Slow(scheduler.session, 0.1)
        body = json.dumps(GOOD | {"max_tokens": 250, "ignore_eos": True, "stream": stream}).encode()
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            while not scheduler.active:
                time.sleep(0.01)
            request = scheduler.active[0]
        idle(app)
        assert request.result.finish_reason == "abort" and len(request.result.token_ids) < 250


def test_a_failing_step_ends_requests_not_the_server(tiny_engine):
    with serving(tiny_engine) as (url, app):
        scheduler = app.state.background.scheduler
        scheduler.session = Slow(scheduler.session, None)  # time.sleep(None) raises
        answer = httpx.post(f"{url}/v1/completions", json=GOOD)
        assert answer.status_code == 500 and "engine failed" in answer.json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.post(f"{url}/v1/completions", json=GOOD).status_code == 429


def test_the_command_serves_and_drains_at_sigterm(tiny_engine):
    command = [
        sys.executable,
        "-c",
        "from speccompile.compiler.cli import main; main()",
        "serve",
        tiny_engine,
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "500"}
    )
    try:
        line = next(line for line in process.stderr if "Serving" in line)
        url = line.split(" at ")[1].split("/v1")[0]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        stream = client.completions.create(
            model="tiny",
            prompt=TEXT,
            max_tokens=200,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        first = next(stream)
        process.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert first.choices[0].text and rest[-1].choices[0].finish_reason == "length"
        assert process.wait(30) in (0, 143, -15)
    finally:
        process.kill()


def test_the_command_refuses_what_is_no_engine(tmp_path):
    assert "is not a directory" in speccompile("serve", tmp_path / "nothing", code=2).stderr
