"""A server that is killed in the middle of a step and started again loses nothing of a text."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from helpers.adaptation import save_pair
from helpers.killed_server import DECIDED, MEMORY, UNDECIDED, Kill, KilledServer, killed_server

from inference.device import RemoteDecoder, link
from inference.device.link import ServerLink
from inference.device.offline_text import OfflineOutput, OfflineWriting
from inference.device.text import RemoteOutput
from inference.drafters.lookup import LookupDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.protocol import Drafter
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.pretrained import load_causal_lm

pytestmark = [pytest.mark.slow, pytest.mark.faults]

PROMPT = [1 + index % 50 for index in range(300)]  # its memory is fetched in two parts
PARTS = [(0, 256), (256, 300)]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_new_tokens": 24},
    "sampled": {"temperature": 0.9, "top_k": 20, "seed": 11, "max_new_tokens": 24},
}
SETTINGS = (
    "--tree fixed --threads 1 --places 2 --capacity 400 --remote-sessions 2 "
    "--dtype float32 --device cpu"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and a trained drafter."""
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def server(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KilledServer]:
    models = ["--target", str(pair / "target"), "--drafter", str(pair / "drafter")]
    with killed_server([*models, *SETTINGS.split()], tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture(scope="module")
def target(pair: Path) -> TargetAdapter:
    return TargetAdapter(load_causal_lm(str(pair / "target")))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client ask again soon, also while the server loads."""
    monkeypatch.setattr(link, "_LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(link, "seconds_to_wait", lambda _: 0.1)


@pytest.fixture
def drafter(pair: Path, target: TargetAdapter, request: pytest.FixtureRequest) -> Drafter:
    if request.param == "lookup":
        return LookupDrafter()
    own = JakiroDrafter.from_pretrained(pair / "drafter").eval()
    return TrainedDrafter.for_target(own, target)


def _written(server: KilledServer, drafter: Drafter, mode: str) -> RemoteOutput:
    with RemoteDecoder(server.url, drafter) as remote:
        return remote.generate(PROMPT, **OPTIONS[mode])


def _continued(target: TargetAdapter) -> list[list[int]]:
    """Return the prompt and the target's own greedy text."""
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    found = target.model.generate(torch.tensor([PROMPT]), **options)
    return found.tolist()


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("drafter", ["lookup", "trained"], indirect=True)
def test_a_server_that_is_killed_in_two_steps_continues_the_same_text(
    server: KilledServer, target: TargetAdapter, drafter: Drafter, mode: str
) -> None:
    expected = _written(server, drafter, mode)
    if mode == "greedy":
        assert expected.sequences.tolist() == _continued(target)
    first, second = sorted(Random(mode).sample(range(1, expected.stats.target_forwards + 1), 2))
    server.kill_at(Kill(DECIDED, first), Kill(UNDECIDED, second))
    known = server.num_kills
    output = _written(server, drafter, mode)
    assert (output.new_token_ids, output.text) == (expected.new_token_ids, expected.text)
    assert output.depths == expected.depths
    assert output.stats.target_forwards == expected.stats.target_forwards
    assert (output.traffic.num_resumes, server.num_kills - known) == (2, 2)


@pytest.mark.parametrize("drafter", ["trained"], indirect=True)
def test_text_that_is_written_alone_while_a_server_starts_again_is_replaced_by_the_targets(
    server: KilledServer, target: TargetAdapter, drafter: Drafter
) -> None:
    server.kill_at(Kill(UNDECIDED, 2), Kill(DECIDED, 4))
    known = server.num_kills
    offline = OfflineWriting(after_seconds=0.0)
    with RemoteDecoder(server.url, drafter, offline=offline) as remote:
        output = remote.generate(PROMPT, **OPTIONS["greedy"])
    assert output.sequences.tolist() == _continued(target)
    assert isinstance(output, OfflineOutput)
    assert output.is_verified
    assert output.provisional.num_written > 0
    assert server.num_kills - known == 2


@pytest.mark.parametrize("drafter", ["trained"], indirect=True)
def test_memory_that_arrived_before_the_kill_is_not_fetched_again(
    server: KilledServer, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    own = ServerLink.memory

    def memory(self: ServerLink, session: str, begin: int, end: int, *others: Any) -> Any:
        asked.append((begin, end))
        return own(self, session, begin, end, *others)

    monkeypatch.setattr(ServerLink, "memory", memory)
    expected = _written(server, drafter, "greedy")
    assert asked == PARTS
    asked.clear()
    last = expected.stats.target_forwards
    server.kill_at(Kill(MEMORY, PARTS[1][0]), Kill(DECIDED, last))
    output = _written(server, drafter, "greedy")
    assert output.new_token_ids == expected.new_token_ids
    assert output.depths == expected.depths  # the drafts too, so the memory was complete
    assert output.traffic.num_resumes == 2
    assert server.num_left == 0
    assert asked == [*PARTS, PARTS[1]]  # the last part again in another session
