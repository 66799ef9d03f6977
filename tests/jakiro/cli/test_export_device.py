"""`jakiro export --to device`, and `jakiro connect` with what it writes."""

import shutil
from pathlib import Path

import pytest
from helpers.commands import exit_code
from helpers.models import tiny_llama, tiny_settings
from helpers.serving import running
from helpers.templates import CHATML
from helpers.tokenizers import tiny_tokenizer

from inference import SpeculativeDecoder
from inference.device import RemoteDecoder
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.ends import DeviceTarget
from jakiro.target.record import record_target

GREEDY = ["--temperature", "0", "--max-new-tokens", "12"]


@pytest.fixture(scope="module", params=["moa", pytest.param("feedback", marks=pytest.mark.slow)])
def decoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> SpeculativeDecoder:
    """A decoder whose target and drafter are folders, which the names of both tell."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = tiny_tokenizer(CHATML)
    model = tiny_llama(vocab=len(tokenizer), max_position_embeddings=512)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    target = TargetAdapter(model)
    record = record_target(target.spec, str(folder / "target"), tokenizer)
    settings = tiny_settings(trunk={"kind": request.param}, draft_vocab_size=40)
    drafter = JakiroDrafter(config_for(settings, record)).eval()
    drafter.save_pretrained(folder / "drafter")
    return SpeculativeDecoder(model, drafter, tokenizer, tree="fixed")


@pytest.fixture(scope="module")
def drafter(decoder: SpeculativeDecoder) -> Path:
    """The folder of the drafter."""
    model: JakiroDrafter = decoder.drafter.model  # type: ignore[union-attr]
    return Path(model.config.target_record.name_or_path).with_name("drafter")


def test_an_exported_drafter_drafts_without_the_target(
    decoder: SpeculativeDecoder,
    drafter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "my device"
    assert exit_code("export", str(drafter), "--to", "device", "--out", str(out)) == 0
    assert f"--drafter '{out}'" in capsys.readouterr().out
    hidden = drafter.with_name("elsewhere")
    shutil.move(drafter.with_name("target"), hidden)
    try:
        with running(decoder, remote_sessions=2) as server:
            words = ["--drafter", str(out), "--memory", "int8", "--stats", *GREEDY]
            assert exit_code("connect", server.url, "some words", *words) == 0
            printed = capsys.readouterr()
            with RemoteDecoder(server.url, str(out)) as remote:
                assert isinstance(remote.drafter.target, DeviceTarget)  # type: ignore[union-attr]
    finally:
        shutil.move(hidden, drafter.with_name("target"))
    prompt = [{"role": "user", "content": "some words"}]
    expected = decoder.generate(prompt, temperature=0, max_new_tokens=12)
    assert printed.out == f"{expected.text}\n"
    assert "requests (0 of them repeated)" in printed.err
