"""What a Prometheus server reads of a serving engine; times are seconds, by the field's usual definitions."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from speccompile.runtime.background import Background
from speccompile.runtime.scheduler import Request

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """`observe` is called on the scheduler's thread with every request that got tokens or ended."""

    def __init__(self, background: Background, settings: dict[str, Any]):
        self.registry = registry = CollectorRegistry()
        width, scheduler = settings["block_width"], background.scheduler

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"speccompile_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple) -> Histogram:
            return Histogram(f"speccompile_{name}", text, buckets=buckets, registry=registry)

        def gauge(name: str, text: str, value) -> None:
            Gauge(f"speccompile_{name}", text, registry=registry).set_function(value)

        self.requests = counter("requests", "Requests that ended.", "finish_reason")
        self.rejected = counter("requests_rejected", "Requests refused because the queue was full.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self.cached_tokens = counter(
            "cached_prompt_tokens", "Of those, tokens another request had left in a cache."
        )
        self.tokens = counter("generation_tokens", "Tokens emitted.")
        self.acceptance = histogram(
            "acceptance_length",
            "Tokens a decode step emitted, the bonus token included.",
            tuple(range(1, width + 1)),
        )
        self.first = histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self.per_token = histogram(
            "time_per_output_token_seconds",
            "Of a request, after its first token, over the tokens that followed.",
            TOKEN_SECONDS,
        )
        gauge("requests_running", "Requests in a slot.", lambda: background.running)
        gauge("requests_waiting", "Requests in the queue.", lambda: background.waiting)
        room = scheduler.session.batch * settings["max_seq_len"]
        gauge(
            "cache_usage_ratio", "Rows of the caches that running requests hold, of all.",
            lambda: sum(request.length for request in scheduler.active) / room,
        )  # fmt: skip

    def observe(self, request: Request) -> None:
        result = request.result
        self.tokens.inc(len(request.new_tokens))
        if result.acceptance_lengths:
            self.acceptance.observe(result.acceptance_lengths[-1])
        elif result.time_to_first_token is not None:
            self.first.observe(result.time_to_first_token)
        if request.live:
            return
        self.requests.labels(result.finish_reason).inc()
        self.prompt_tokens.inc(len(result.prompt))
        self.cached_tokens.inc(result.reused_tokens)
        after_first = len(result.token_ids) - 1
        if after_first > 0 and result.elapsed_s is not None:
            self.per_token.observe((result.elapsed_s - result.time_to_first_token) / after_first)
