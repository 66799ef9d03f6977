"""Writing target states: planned size, interruptions, parallel writers, damaged shards."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.target_states import offline_run, write_target_states
from helpers.training import TEXTS, write_jsonl

from jakiro.errors import CheckpointError, ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache
from training.config import TrainSettings
from training.input_settings import TargetStateDtype
from training.loss.batch import Batch
from training.setup.preparation import prepare
from training.target_states import writer as writer_module
from training.target_states.index import is_intact, read_index
from training.target_states.plan import TargetStatePlan
from training.target_states.writer import TargetStateWriter

SHARD_BYTES = 2**16
BYTES = 4 * (32 + 3 * 32)  # fp32: a feature, and keys and values of three layers


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


def test_the_size_is_known_before_anything_is_written(workshop: Path) -> None:
    plan = new_writer(offline_run(workshop), workshop / "features").plan
    assert plan.bytes_per_position == BYTES
    assert plan.num_bytes == plan.num_sequences * 48 * BYTES == plan.num_bytes_left
    assert str(plan).startswith(f"{plan.num_sequences * 48:,} tokens x {BYTES} bytes = ")
    write_target_states(offline_run(workshop))
    index = read_index(workshop / "features")
    assert index is not None
    assert index.num_shards == plan.num_shards > 2
    files = list((workshop / "features").glob("*.safetensors"))
    written = sum(path.stat().st_size for path in files)
    assert plan.num_bytes < written < 1.02 * plan.num_bytes  # shards have headers


def test_states_in_half_precision_take_half_the_space(workshop: Path) -> None:
    plans = [
        new_writer(offline_run(workshop, dtype), workshop / dtype).plan
        for dtype in ("fp32", "bf16")
    ]
    assert plans[0].num_bytes == 2 * plans[1].num_bytes


def plan_in(dtype: TargetStateDtype) -> TargetStatePlan:
    return TargetStatePlan(
        sequence_length=10,
        num_sequences=20,
        num_sequences_left=10,
        bytes_per_position=2**20,
        num_shards=2,
        dtype=dtype,
    )


@pytest.mark.parametrize(("free", "fits"), [(99, False), (104, False), (106, True)])
def test_writing_does_not_begin_if_the_disk_is_too_small_for_a_margin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    plan = plan_in("fp32")
    usage = shutil.disk_usage(tmp_path)._replace(free=free * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    if fits:
        plan.check_disk(tmp_path)
        return
    with pytest.raises(ConfigError, match=r"expected: 105\.3 MiB free; got: .* MiB; remedy"):
        plan.check_disk(tmp_path)


@pytest.mark.parametrize(("dtype", "is_advised"), [("fp32", True), ("bf16", False)])
def test_a_smaller_dtype_is_advised_only_if_there_is_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: TargetStateDtype,
    is_advised: bool,
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ConfigError, match="remedy: choose another disk") as raised:
        plan_in(dtype).check_disk(tmp_path)
    assert ("target_states.dtype=bf16" in str(raised.value)) == is_advised


def test_a_full_disk_is_noticed_before_the_target_reads_anything(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = new_writer(offline_run(workshop), workshop / "features")
    usage = shutil.disk_usage(workshop)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ConfigError, match="do not fit on the disk"):
        writer.write(interrupt_after(0))


@pytest.mark.parametrize("num_sequences", [1, 5, 7])
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
    assert again.plan.num_sequences_left < again.plan.num_sequences or not before
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


def test_a_shard_that_cannot_be_written_leaves_no_part_of_itself(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(_parts: object, path: Path) -> None:
        path.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    writer = new_writer(offline_run(workshop), workshop / "features")
    with monkeypatch.context() as patched:
        patched.setattr(writer_module, "save_file", fill_the_disk)
        with pytest.raises(CheckpointError, match=r"cannot write .*No space left.*free disk space"):
            writer.write()
    left = {path.suffix for path in (workshop / "features").iterdir()}
    assert left == {".json", ".lock"}
    assert writer.write()


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
    assert sum(counts) == writers[0].plan.num_sequences
    assert all(counts)


def test_damaged_shards_are_found_by_their_bytes_and_written_again(workshop: Path) -> None:
    writer = write_target_states(offline_run(workshop))
    before = contents(workshop / "features")
    damaged, lost = sorted((workshop / "features").glob("*.safetensors"))[:2]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    lost.unlink()
    assert writer.folder.drop_damaged() == [damaged.name, lost.name]
    assert writer.write()
    assert contents(workshop / "features") == before
    index = read_index(workshop / "features")
    assert index is not None
    assert all(is_intact(workshop / "features", shard) for shard in index.shards)


def test_a_folder_of_other_target_states_is_refused(workshop: Path) -> None:
    write_target_states(offline_run(workshop))
    folder = workshop / "features"
    for changes, name in (
        ({"data": {"sequence_length": 32}}, "packing differs.*remedy: set data.split"),
        ({"drafter": {"memory": {"layers": [0]}}}, "parts differs"),
    ):
        with pytest.raises(ConfigError, match=name):
            new_writer(offline_run(workshop, **changes), folder)
    with pytest.raises(ConfigError, match=r"dtype differs\); expected: bf16; got: fp32"):
        new_writer(offline_run(workshop, "bf16"), folder)
    write_jsonl(workshop / "texts.jsonl", [{"text": text + "more"} for text in TEXTS])
    with pytest.raises(ConfigError, match="data differs"):
        new_writer(offline_run(workshop), folder)
