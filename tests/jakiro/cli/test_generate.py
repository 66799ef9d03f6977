"""`jakiro generate`: text on standard output, a caller's mistake in one line on standard error."""

import io
from pathlib import Path

import pytest
import torch
from helpers.models import tiny_llama, tiny_settings
from helpers.templates import family_tokenizer
from helpers.tokenizers import tiny_tokenizer
from transformers import GenerationConfig

from inference import SpeculativeDecoder
from jakiro.cli import main
from jakiro.cli.generate import _write
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target


@pytest.fixture
def drafter_path(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    record = record_target(TargetAdapter(model).spec, str(tmp_path / "target"), tokenizer)
    torch.manual_seed(0)
    JakiroDrafter(config_for(tiny_settings(), record)).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.fixture
def chat_target(tmp_path: Path) -> Path:
    """The folder of a target with a chat template."""
    tokenizer = family_tokenizer("chatml")
    model = tiny_llama(vocab=len(tokenizer), max_position_embeddings=512)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    return tmp_path / "chat"


def _give(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def _run(*words: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", *words])
    return int(exit_info.value.code or 0)


@pytest.mark.parametrize(
    ("is_terminal", "expected"), [(True, "a]0;x\nb"), (False, "a\x1b]0;x\x07\nb")]
)
def test_a_terminal_gets_no_control_characters(
    is_terminal: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    _write("a\x1b]0;x\x07\nb")
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("words", [("--drafter", "lookup"), ("--drafter=lookup",)])
def test_the_drafter_may_be_written_as_an_option(
    words: tuple[str, ...], chat_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--target", str(chat_target), "--max-new-tokens", "4")
    assert _run("lookup", "main(", *options) == 0
    expected = capsys.readouterr().out
    assert _run("main(", *options, *words) == 0
    assert capsys.readouterr().out == expected


def test_the_target_is_named_with_its_dtype_unless_the_user_chose_it(
    drafter_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(str(drafter_path), "def", "--max-new-tokens", "2") == 0
    assert "target: target, float32, " in capsys.readouterr().err
    assert _run(str(drafter_path), "def", "--max-new-tokens", "2", "--dtype", "fp32") == 0
    assert "target: " not in capsys.readouterr().err


def test_a_prompt_is_a_chat_message_if_the_target_has_a_chat_template(
    chat_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["lookup", "main(", "--target", str(chat_target), "--max-new-tokens", "8"]
    texts = {}
    for extra in ((), ("--raw",), ("--system", "def")):
        assert _run(*words, *extra) == 0
        captured = capsys.readouterr()
        assert ("chat template" in captured.err) == ("--raw" not in extra)
        texts[extra] = captured.out.removesuffix("\n")
    decoder = SpeculativeDecoder.from_pretrained("lookup", chat_target)
    user, system = ({"role": r, "content": c} for r, c in (("user", "main("), ("system", "def")))
    for extra, prompt in zip(texts, ([user], "main(", [system, user]), strict=True):
        assert texts[extra] == decoder.generate(prompt, max_new_tokens=8).text
    assert len(set(texts.values())) == 3


def test_a_prompt_can_be_read_from_standard_input(
    chat_target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--target", str(chat_target), "--max-new-tokens", "8"]
    assert _run("lookup", "naïve", *options) == 0
    expected = capsys.readouterr().out
    _give(monkeypatch, "naïve\n".encode())
    assert _run("lookup", "-", *options) == 0
    assert capsys.readouterr().out == expected
    _give(monkeypatch, b"\xff\xfe")
    assert _run("lookup", "-", *options) == 2
    assert "not text in UTF-8" in capsys.readouterr().err
    _give(monkeypatch, b"")
    assert _run("lookup", "-", *options) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_a_model_that_ends_at_once_is_reported_with_a_remedy(
    chat_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GenerationConfig.from_pretrained(chat_target)
    config.eos_token_id = list(range(400))  # every token ends the text
    config.save_pretrained(chat_target)
    tokenizer = family_tokenizer("chatml")
    tokenizer.add_tokens(
        tokenizer.convert_ids_to_tokens(range(len(tokenizer))), special_tokens=True
    )
    tokenizer.save_pretrained(chat_target)
    words = ["lookup", "main(", "--target", str(chat_target)]
    assert _run(*words, "--raw") == 0
    captured = capsys.readouterr()
    assert captured.out == "\n"
    assert "ended the text at once; remedy: leave out --raw" in captured.err
    assert _run(*words) == 0
    assert "remedy: ask in other words" in capsys.readouterr().err


def test_the_defaults_of_sampling_are_those_of_the_generation_config(
    drafter_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(drafter_path), "def", "--max-new-tokens", "20"]
    assert _run(*words) == 0
    greedy = capsys.readouterr().out
    config = GenerationConfig(do_sample=True, temperature=1.5)
    config.save_pretrained(drafter_path.parent / "target")
    assert _run(*words) == 0
    assert capsys.readouterr().out != greedy
    for extra in (["--temperature", "0"], ["--top-k", "1"]):
        assert _run(*words, *extra) == 0
        assert capsys.readouterr().out == greedy
