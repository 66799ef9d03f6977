"""`jakiro connect`: texts and chats whose target is on a server."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.bad_network import LOST, PASSED, bad_network
from helpers.commands import exit_code
from helpers.serving import Running, running, tiny_decoder

from inference import SpeculativeDecoder
from inference.device import RemoteDecoder

KEY = "the key of the server"


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return tiny_decoder()


@pytest.fixture(scope="module")
def server(decoder: SpeculativeDecoder) -> Iterator[Running]:
    with running(decoder, remote_sessions=2, api_keys=(KEY,)) as found:
        yield found


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAKIRO_API_KEY", KEY)


def _chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [
        {"role": roles[number % 2], "content": content} for number, content in enumerate(contents)
    ]


def test_a_prompt_is_answered(
    server: Running, decoder: SpeculativeDecoder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--temperature", "0", "--max-new-tokens", "12", "--stats"]
    assert exit_code("connect", server.url, "some words", *words) == 0
    printed = capsys.readouterr()
    expected = decoder.generate(_chat("some words"), temperature=0, max_new_tokens=12)
    assert printed.out == f"{expected.text}\n"
    assert "requests (0 of them repeated)" in printed.err


def test_a_text_from_standard_input_is_continued(
    server: Running,
    decoder: SpeculativeDecoder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"some words\n")))
    words = ["--raw", "--drafter", "none", "--temperature", "0.9", "--seed", "3"]
    assert exit_code("connect", server.url, "-", *words, "--max-new-tokens", "9") == 0
    expected = decoder.generate("some words", temperature=0.9, seed=3, max_new_tokens=9)
    assert capsys.readouterr().out == f"{expected.text}\n"


def test_lines_are_messages_of_a_chat(
    server: Running,
    decoder: SpeculativeDecoder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nand now\n"))
    assert exit_code("connect", server.url, "--temperature", "0", "--max-new-tokens", "6") == 0
    options = {"temperature": 0, "max_new_tokens": 6}
    first = decoder.generate(_chat("hello"), **options).text
    second = decoder.generate(_chat("hello", first or "", "and now"), **options).text
    assert capsys.readouterr().out == f"{first}\n{second}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://127.0.0.1:1", "x"], "cannot reach the server"),
        (["nonsense", "x"], "not the address of a server"),
        (["URL", " "], "the prompt is empty"),
        (["URL", "x", "--drafter", "some/folder"], "cannot draft on this machine"),
        (["URL", "x", "--memory", "int8"], "only for a trained drafter"),
        (["URL", "--raw"], "only a chat has messages"),
        (["URL", "x", "--raw", "--system", "y"], "only a chat has messages"),
        (["URL", "x", "--max-new-tokens", "9999"], "longer than a sequence may be"),
    ],
)
def test_what_cannot_be_used_is_named(
    server: Running, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    own = [server.url if word == "URL" else word for word in words]
    assert exit_code("connect", *own) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def roomy(decoder: SpeculativeDecoder) -> Iterator[Running]:
    """A server for clients that cannot end their sessions."""
    with running(decoder, remote_sessions=2, api_keys=(KEY,)) as found:
        yield found


def test_a_text_that_was_stopped_is_written_again_with_its_seed(
    roomy: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["some words", "--temperature", "0.9", "--max-new-tokens", "40"]
    stop = ["--offline", "stop", "--patience", "0.2"]
    with bad_network(roomy.root, lambda number, _: PASSED if number < 6 else LOST) as network:
        assert exit_code("connect", network.url, *words, *stop) == 2
    stopped = capsys.readouterr()
    found = re.search(
        r"the text was stopped after (\d+) verified tokens; to get all of it, run the same command "
        r"with --seed (\d+)\nerror: cannot reach the server",
        stopped.err,
    )
    assert found is not None
    assert 5 <= int(found[1]) < 40
    assert stopped.out.endswith("\n")
    assert exit_code("connect", roomy.url, *words, "--seed", found[2], *stop) == 0
    whole = capsys.readouterr()
    assert whole.out.startswith(stopped.out[:-1])
    assert len(whole.out) > len(stopped.out)
    assert "stopped" not in whole.err


def test_an_interruption_ends_an_answer_and_not_the_chat(
    server: Running,
    decoder: SpeculativeDecoder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generate, asked = RemoteDecoder.generate, list[Any]()

    def interrupted_once(self: RemoteDecoder, prompt: Any, **options: Any) -> Any:
        asked.append(prompt)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return generate(self, prompt, **options)

    monkeypatch.setattr(RemoteDecoder, "generate", interrupted_once)
    lines = io.StringIO("first\nsecond\n")
    lines.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", lines)
    assert exit_code("connect", server.url, "--temperature", "0", "--max-new-tokens", "4") == 0
    printed = capsys.readouterr()
    assert asked == [_chat("first"), _chat("second")]
    assert "stopped; the dialogue goes on without this message" in printed.err
    expected = decoder.generate(_chat("second"), temperature=0, max_new_tokens=4)
    assert expected.text is not None
    assert expected.text in printed.out


@pytest.mark.slow
def test_a_text_goes_on_without_a_connection(
    decoder: SpeculativeDecoder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target: Any = decoder.target.model
    target.save_pretrained(tmp_path)
    assert decoder.tokenizer is not None
    decoder.tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()  # libraries may write when they are first used

    def schedule(number: int, _path: str) -> str:
        return LOST if 3 <= number < 12 else PASSED

    words = ["--drafter", f"lm={tmp_path}", "--offline", "write", "--dtype", "float32"]
    with (
        running(decoder, remote_sessions=2, api_keys=(KEY,)) as server,
        bad_network(server.root, schedule) as network,
    ):
        options = ["--temperature", "0", "--max-new-tokens", "40"]
        assert exit_code("connect", network.url, "some words", *words, *options) == 0
    printed = capsys.readouterr()
    expected = decoder.generate(_chat("some words"), temperature=0, max_new_tokens=40)
    assert printed.out == f"{expected.text}\n"
    assert "provisional tokens" in printed.err
