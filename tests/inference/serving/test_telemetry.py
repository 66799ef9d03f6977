"""The metrics of a server."""

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


def test_no_metric_contains_what_clients_send(server: Running, client: OpenAI) -> None:
    canary = "canary-7f3a"
    client.completions.create(model=MODEL, prompt=canary, max_tokens=2, user=canary)
    httpx2.post(f"{server.url}/completions", content=canary)
    assert canary not in httpx2.get(f"{server.root}/metrics").text
