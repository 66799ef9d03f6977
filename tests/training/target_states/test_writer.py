"""Writing target states: planned size, interruptions, parallel writers, damaged shards."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.target_states import offline_run, write_target_states
from helpers.training import TEXTS, write_jsonl

from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache
from training.config import TrainSettings
from training.loss.batch import Batch
from training.setup.preparation import prepare
from training.target_states import writer as writer_module
from training.target_states.writer import TargetStateWriter

SHARD_BYTES = 2**16


class PowerCutError(Exception):
    """A simulated power cut."""


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of all files in a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def interrupt_after(num_sequences: int) -> Callable[[int], None]:
    """Return a callback that stops the writer after a number of sequences."""
    count = 0

    def advance(more: int) -> None:
        nonlocal count
        count += more
        if count >= num_sequences:
            raise PowerCutError

    return advance


def new_writer(settings: TrainSettings, folder: Path, size: int = SHARD_BYTES) -> TargetStateWriter:
    return TargetStateWriter(prepare(settings), folder, size)


@pytest.mark.parametrize("num_sequences", [1, 5])
def test_an_interrupted_writer_is_completed_to_the_same_bytes(
    workshop: Path, num_sequences: int
) -> None:
    settings = offline_run(workshop)
    write_target_states(settings)
    folder = workshop / "halved"
    with pytest.raises(PowerCutError):
        new_writer(settings, folder).write(interrupt_after(num_sequences))
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    again = new_writer(settings, folder)
    total = again.index.fingerprint.total_sequences
    assert again.num_sequences_left < total or not before
    assert again.write()
    assert contents(folder) == contents(workshop / "features")
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_writer_goes_on_with_the_micro_batches_of_the_shards_that_exist(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, folder = offline_run(workshop), workshop / "halved"
    write_target_states(settings)
    read, sizes = writer_module.read_batch, set()

    def sized_read(target: TargetAdapter, batch: Batch, cache: SlotCache) -> object:
        sizes.add(batch.token_ids.shape[0])
        return read(target, batch, cache)

    monkeypatch.setattr(writer_module, "read_batch", sized_read)
    with pytest.raises(PowerCutError):
        new_writer(settings, folder).write(interrupt_after(5))
    batch = settings.batch.model_copy(update={"micro_batch_size": 1})
    assert new_writer(settings.model_copy(update={"batch": batch}), folder).write()
    assert sizes == {settings.batch.micro_batch_size}  # rounding may depend on it
    assert contents(folder) == contents(workshop / "features")


def test_writers_side_by_side_share_the_shards(workshop: Path) -> None:
    settings = offline_run(workshop)
    write_target_states(settings)
    folder, counts = workshop / "shared", [0, 0]
    writers = [new_writer(settings, folder) for _ in counts]

    def work(number: int) -> None:
        def advance(more: int) -> None:
            counts[number] += more

        writers[number].write(advance)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(folder) == contents(workshop / "features")
    assert sum(counts) == writers[0].index.fingerprint.total_sequences
    assert all(counts)


def test_shortened_and_missing_shards_are_written_again(workshop: Path) -> None:
    writer = write_target_states(offline_run(workshop))
    before = contents(workshop / "features")
    damaged, lost = sorted((workshop / "features").glob("*.safetensors"))[:2]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    lost.unlink()
    assert writer.write()
    assert contents(workshop / "features") == before


def test_shards_without_an_index_are_written_again(workshop: Path) -> None:
    write_target_states(offline_run(workshop))
    folder = workshop / "features"
    before = contents(folder)
    first = min(folder.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-4] + bytes(4))  # whole, with other states
    (folder / "index.json").unlink()
    assert new_writer(offline_run(workshop), folder).write()
    assert contents(folder) == before


def test_a_folder_of_other_target_states_is_refused(workshop: Path) -> None:
    write_target_states(offline_run(workshop))
    folder = workshop / "features"
    for changes, name in (
        ({"data": {"sequence_length": 32}}, "packing differs"),
        ({"drafter": {"memory": {"layers": [0]}}}, "parts differs"),
    ):
        with pytest.raises(ConfigError, match=name):
            new_writer(offline_run(workshop, **changes), folder)
    with pytest.raises(ConfigError, match=r"dtype differs\); expected: bf16; got: fp32"):
        new_writer(offline_run(workshop, "bf16"), folder)
    write_jsonl(workshop / "texts.jsonl", [{"text": text + "more"} for text in TEXTS])
    with pytest.raises(ConfigError, match="data differs"):
        new_writer(offline_run(workshop), folder)
