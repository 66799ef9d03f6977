"""Clients that draft get the texts that the server writes alone, whatever is lost on the way."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.models import tiny_llama
from helpers.serving import Running, running, tiny_decoder
from helpers.tokenizers import spaced_tokenizer

from inference import SpeculativeDecoder
from inference.benchmark.server import devices
from inference.benchmark.server.document import DecidedSteps, LoadDocument, LoadSettings
from inference.benchmark.server.figures import load_table
from inference.benchmark.server.run import measure_load
from inference.client.request import ServerRequest
from inference.device import attempts
from inference.drafters.lookup import LookupDrafter
from jakiro.errors import ConfigError, JakiroError
from jakiro.utils.settings import validate_settings

TEXTS = ("def main(", "print(", "return 41", "import", "# naïve → 漢字\n")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server with few places, and sessions for all clients."""
    with running(tiny_decoder(), remote_sessions=6, remote_sessions_per_key=6) as found:
        yield found


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with texts and a chat."""
    file = tmp_path_factory.mktemp("load") / "prompts.jsonl"
    chat = {"messages": [{"role": "user", "content": "Why?"}]}
    lines = [*({"prompt": text} for text in TEXTS), chat]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients repeat lost requests at once."""
    monkeypatch.setattr(attempts, "_FIRST_PAUSE", 0.001)


def _measured(url: str, prompts: Path, **changes: Any) -> LoadDocument:
    values = {"max_new_tokens": 12, "concurrency": 6, "timeout": 30.0, "check": True}
    own = {"temperatures": (0.0, 1.0), "device_drafter": "lookup", **changes}
    settings = LoadSettings(url=url, prompts=str(prompts), **{**values, **own})
    return asyncio.run(measure_load(settings))


def test_texts_that_clients_draft_are_those_of_the_server_alone(
    server: Running, prompts: Path
) -> None:
    document = _measured(server.url, prompts, lost_share=0.2)
    figures, decided = document.figures, document.decided
    assert document.passed
    assert figures.outcomes == {"complete": 12}
    assert document.comparisons is not None
    assert (document.comparisons.greedy_equal, document.comparisons.sampled_equal) == (6, 6)
    assert figures.device is not None
    assert decided is not None
    assert decided.decided == figures.device.steps
    assert 0 < decided.replayed <= figures.device.repeats
    assert figures.device.resumes == 0
    assert figures.accepted is not None
    assert figures.tokens == 12 * 12
    assert figures.time_to_first_token is not None
    shown = "\n".join(str(part) for part in load_table(document))
    assert f"{figures.device.steps} decoding steps of clients that draft" in shown
    assert f"the server has decided {decided.decided} steps" in shown
    assert LoadDocument.model_validate_json(document.model_dump_json()) == document


def test_a_server_that_decides_steps_twice_fails(
    server: Running, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = devices.decided_steps

    async def planted(url: str, key: str | None) -> DecidedSteps | None:
        found = await counted(url, key)
        assert found is not None
        return DecidedSteps(decided=found.decided + found.replayed, replayed=0)

    monkeypatch.setattr("inference.benchmark.server.run.decided_steps", planted)
    document = _measured(server.url, prompts, lost_share=0.3)
    assert document.num_decided_twice > 0
    assert not document.passed


def test_without_losses_nothing_is_repeated(server: Running, prompts: Path) -> None:
    document = _measured(server.url, prompts, temperatures=(0.0,), check=False)
    assert document.passed
    assert document.figures.device is not None
    assert (document.figures.device.repeats, document.figures.device.resumes) == (0, 0)


def test_a_client_that_cannot_draft_ends_the_load_with_its_own_error(
    server: Running, prompts: Path
) -> None:
    with pytest.raises(JakiroError, match="no-such-drafter"):
        _measured(server.url, prompts, check=False, device_drafter="no-such-drafter")


def test_texts_after_a_prompt_begin_alike_on_both_sides(tmp_path: Path) -> None:
    tokenizer = spaced_tokenizer()
    model = tiny_llama(vocab=len(tokenizer), max_position_embeddings=512)
    words = tokenizer.convert_tokens_to_ids(["▁a", "b", "▁b"])
    model.generation_config.suppress_tokens = sorted({*range(len(tokenizer))} - {*words})
    decoder = SpeculativeDecoder(model, LookupDrafter(), tokenizer, tree="fixed")
    lines = [json.dumps({"prompt": "ab" * count}) for count in range(1, 9)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    with running(decoder, remote_sessions=6, remote_sessions_per_key=6) as server:
        document = _measured(server.url, tmp_path / "prompts.jsonl", max_new_tokens=30)
    assert document.passed
    assert document.figures.outcomes == {"complete": 16}


def test_a_text_that_the_server_refuses_is_a_failure(server: Running) -> None:
    client = devices.DeviceClient(server.url, None, "lookup", 1.0)
    answer = client.ask(ServerRequest("def main(", 5000, 0.0))
    client.close()
    assert "longer than a sequence may be" in (answer.error or "")
    assert not answer.is_complete
    assert answer.device is None


@pytest.mark.parametrize(
    "options",
    [
        {"device_drafter": None, "lost_share": 0.1},
        {"cut_share": 0.1},
        {"unstreamed_share": 0.1},
    ],
    ids=str,
)
def test_options_that_do_not_fit_together_are_refused(options: dict[str, Any]) -> None:
    values = {"url": "http://x", "prompts": "x", "device_drafter": "lookup", **options}
    with pytest.raises(ConfigError, match=r"--lost-share|--device-drafter"):
        validate_settings(LoadSettings, values, source="a test")


def test_encrypted_replies_cannot_be_lost() -> None:
    with (
        pytest.raises(ConfigError, match="without encryption"),
        devices.losing_replies("https://example.org/v1", 0.1, 0),
    ):
        pass


def test_a_server_without_such_counts_is_unknown() -> None:
    assert asyncio.run(devices.decided_steps("http://127.0.0.1:1/v1", None)) is None
