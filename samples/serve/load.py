"""A bounded load on a running server: `python samples/serve/load.py http://127.0.0.1:8000 --clients 32 --seconds 60`.

Every client sends one streamed completion after the other, some of which it abandons half-way. Printed: requests and tokens a
second, time to first token and per token, what failed, and, with --pid, the server's memory before and after.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path

import httpx


def resident(pid: int | None) -> float | None:
    """MiB of a process (Linux)."""
    if pid is None:
        return None
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


async def client(url: str, until: float, seed: int, outcome: dict[str, list]) -> None:
    generator = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        while time.monotonic() < until:
            words = " ".join(
                generator.choices(
                    ("while", "for", "the", "statement", "is", "a", "list"), k=generator.randint(1, 40)
                )
            )
            body = {
                "prompt": words,
                "max_tokens": generator.choice((8, 32, 64)),
                "temperature": 0,
                "stream": True,
            }
            abandoned = generator.random() < 0.1
            start = time.perf_counter()
            pieces: list[float] = []
            try:
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    if answer.status_code != 200:
                        outcome["failed"].append(answer.status_code)
                        continue
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            if "error" in json.loads(line[6:]):
                                outcome["failed"].append(line)
                            pieces.append(time.perf_counter() - start)
                            if abandoned and len(pieces) > 2:
                                break
            except httpx.HTTPError as error:
                outcome["failed"].append(repr(error))
                continue
            outcome["abandoned" if abandoned else "done"].append(pieces)


async def load(url: str, clients: int, seconds: float) -> dict[str, list]:
    outcome: dict[str, list] = {"done": [], "abandoned": [], "failed": []}
    until = time.monotonic() + seconds
    await asyncio.gather(*(client(url, until, seed, outcome) for seed in range(clients)))
    return outcome


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--pid", type=int, help="the server's process, to watch its memory")
    options = parser.parse_args()
    asyncio.run(load(options.url, options.clients, min(5.0, options.seconds)))  # warm up
    tokens, before, start = (
        metric(options.url, "speccompile_generation_tokens_total"),
        resident(options.pid),
        time.time(),
    )
    outcome = asyncio.run(load(options.url, options.clients, options.seconds))
    seconds = time.time() - start
    tokens = metric(options.url, "speccompile_generation_tokens_total") - tokens
    first = [pieces[0] for pieces in outcome["done"]]
    print(
        f"{len(outcome['done'])} requests in {seconds:.0f} s by {options.clients} clients: {len(outcome['done']) / seconds:.1f} requests/s, {tokens / seconds:.0f} tokens/s"
    )
    print(
        f"time to first text: median {statistics.median(first) * 1e3:.0f} ms, worst {max(first) * 1e3:.0f} ms"
    )
    print(
        f"{len(outcome['abandoned'])} abandoned half-way, {len(outcome['failed'])} failed {outcome['failed'][:3]}"
    )
    left = metric(options.url, "speccompile_requests_running") + metric(
        options.url, "speccompile_requests_waiting"
    )
    print(f"left running or waiting: {left:.0f}")
    if before is not None:
        print(f"server memory: {before:.0f} MiB before, {resident(options.pid):.0f} MiB after")


if __name__ == "__main__":
    main()
