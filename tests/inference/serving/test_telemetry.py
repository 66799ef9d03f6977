"""The metrics of a server and of a request."""

from typing import Any
from unittest.mock import ANY

import httpx2
from helpers.serving import MODEL, Running
from openai import OpenAI


def _values(server: Running) -> dict[str, float]:
    page = httpx2.get(f"{server.root}/metrics").text
    lines = [line for line in page.splitlines() if line and not line.startswith("#")]
    pairs = (line.rpartition(" ") for line in lines)
    return {name: float(value) for name, _, value in pairs}


def test_steps_drafts_and_times_are_counted(server: Running, client: OpenAI) -> None:
    before = _values(server)
    usage = client.completions.create(
        model=MODEL, prompt="def main(", max_tokens=40, temperature=0
    ).usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    after = _values(server)

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    by_depth = [name for name in after if name.startswith("jakiro_accepted_by_depth_total")]
    accepted = usage.completion_tokens_details.accepted_prediction_tokens
    assert sum(map(gained, by_depth)) == accepted
    steps = gained("jakiro_decoding_steps_total")
    assert steps + (accepted or 0) == usage.completion_tokens - 1 == 39
    for name in ("queue", "prefill", "first_token", "request"):
        assert gained(f"jakiro_{name}_seconds_count") == 1
    assert gained("jakiro_step_seconds_count") == steps


def test_the_common_metrics_of_a_request_agree_with_the_counters(
    server: Running, client: OpenAI
) -> None:
    before = _values(server)
    request = {"model": MODEL, "prompt": "def main(", "max_tokens": 40, "temperature": 0}
    asked: dict[str, Any] = {"extra_body": {"jakiro": {"metrics": True}}}
    whole = client.completions.create(**request, **asked)
    after = _values(server)
    streamed = [*client.completions.create(**request, **asked, stream=True)][-1]
    assert whole.model_extra is not None
    assert streamed.model_extra is not None
    metrics = whole.model_extra["metrics"]["speculative_decoding"]
    assert streamed.model_extra["metrics"]["speculative_decoding"] == metrics

    def gained(name: str) -> float:
        name = f"vllm:spec_decode_num_{name}"
        return after[name] - before.get(name, 0.0)

    histogram = metrics["acceptance_histogram"]
    accepted = sum(number * steps for number, steps in enumerate(histogram))
    assert accepted == metrics["num_accepted_draft_tokens"] == gained("accepted_tokens_total")
    assert sum(histogram) == metrics["num_spec_steps"] == gained("drafts_total")
    assert metrics["num_draft_tokens"] == gained("draft_tokens_total")
    assert metrics["mean_acceptance_length"] == 1 + accepted / sum(histogram)
    assert metrics["draft_acceptance_rate"] == accepted / metrics["num_draft_tokens"]
    by_position = [name for name in after if "num_accepted_tokens_per_pos_total" in name]
    assert sum(after[name] - before.get(name, 0.0) for name in by_position) == accepted
    assert client.completions.create(**request).model_extra == {"jakiro": {"seed": ANY}}


def test_no_metric_contains_what_clients_send(server: Running, client: OpenAI) -> None:
    canary = "canary-7f3a"
    client.completions.create(model=MODEL, prompt=canary, max_tokens=2, user=canary)
    httpx2.post(f"{server.url}/completions", content=canary)
    assert canary not in httpx2.get(f"{server.root}/metrics").text
