"""A training run: resumption, optimizer steps, metrics, evaluations, checkpoints, and export."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import torch
from rich.progress import Progress

from jakiro.drafter import JakiroDrafter
from jakiro.utils.logs import get_logger
from jakiro.utils.pretrained import TORCH_DTYPES
from jakiro.utils.progress import COLUMNS_WITH_RATE, ProgressDisplay
from training.config import anchor_rule
from training.data.sampler import Sampler
from training.evaluation import Evaluation, scores_of, summary_of
from training.loop.checkpoint import Checkpoints, RunState
from training.loop.export import Exporter
from training.loop.metrics import MetricsLog
from training.loop.run_folder import RunFolder
from training.loop.trainer import Trainer
from training.module import TargetReader, move_target
from training.processes import Interruption, Processes, explain_exhaustion
from training.setup.adapters import add_adapters
from training.setup.initialization import initialize, reads_data
from training.setup.preparation import RunInputs, length_of
from training.target_states.store import TargetStateStore, open_target_states

_logger = get_logger(__name__)


class Run:
    """Carries out a prepared run, or the rest of an interrupted one.

    All processes take part, and the first process writes the files.
    """

    _trainer: Trainer
    _evaluation: Evaluation

    def __init__(self, inputs: RunInputs, processes: Processes) -> None:
        self._inputs = inputs
        self._settings = inputs.settings
        self._num_steps = inputs.settings.with_steps(len(inputs.sequences)).num_steps
        self._processes = processes
        self._folder = RunFolder(inputs.settings.run_folder)
        self._exporter = Exporter(inputs, self._folder, processes)
        self._state = RunState()
        self._checkpoints = Checkpoints(
            self._folder.checkpoints, inputs.settings.checkpoint.keep, processes
        )
        self._evaluation_interval: int | None = None
        self._seconds_unrecorded = 0.0
        self._elapsed = 0.0  # fraction of `minutes` that has passed
        self._interruption = Interruption(processes)
        self._is_interrupted = False
        self._metrics: MetricsLog | None = None
        self._target_states: TargetStateStore | None = None

    @property
    def last_step(self) -> int:
        return self._state.step

    def complete(self, progress: Progress | None = None) -> Path:
        self._settings.batch.accumulation(self._processes.count)
        is_finished = self._folder.is_finished_for(self._settings, self._inputs.facts)
        if not is_finished:
            self._target_states = open_target_states(self._inputs)
        with self._claimed():
            if is_finished:
                _logger.info(f"the run in {self._folder.path} is already finished")
            else:
                shown = ProgressDisplay(*COLUMNS_WITH_RATE, is_shown=self._processes.is_first)
                with (
                    explain_exhaustion(),
                    nullcontext(progress) if progress else shown as bar,
                ):
                    self._train(bar)
            self._processes.wait()
        return self._folder.drafter

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Let the first process lock the run folder before all processes enter the block."""
        with ExitStack() as held:
            with self._processes.together():
                if self._processes.is_first:
                    folder = self._folder.claim(self._settings, self._inputs.facts)
                    held.enter_context(folder)
            yield

    def _train(self, progress: Progress) -> None:
        sampler = self._build_sampler()
        drafter = self._build_drafter(sampler)
        move_target(self._inputs.target, self._processes.device, needs_layers=self._runs_target)
        reader = TargetReader(
            self._inputs.target,
            drafter,
            self._settings.data.sequence_length,
            TORCH_DTYPES[self._settings.engine.dtype],
            self._target_states,
        )
        trainer = self._trainer = Trainer(drafter, reader, sampler, self._settings, self._processes)
        self._evaluation = Evaluation(self._inputs, reader, self._processes)
        try:
            with self._interruption.receive():
                self._take_steps(progress)
            drafter, trained, metrics = self._evaluate()
            self._exporter.finish(drafter, trained, metrics, self._state_now())
        finally:
            if self._metrics is not None:
                self._metrics.close()
            trainer.engine.destroy()

    @property
    def _runs_target(self) -> bool:
        """Whether the target's layers are run: to compute states, to decode, or as tail layers."""
        num_tail = self._settings.drafter.tail_layers
        return self._target_states is None or bool(self._inputs.prompts) or num_tail > 0

    def _build_drafter(self, sampler: Sampler) -> JakiroDrafter:
        inputs, settings = self._inputs, self._settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)  # every process needs the same weights
            drafter = inputs.build_drafter()
        batches = None
        if self._checkpoints.latest() is None and reads_data(settings, inputs.target):
            move_target(inputs.target, self._processes.device, needs_layers=True)
            batches = sampler.first_batches(settings.initialize.fit_tokens)
        initialize(drafter, settings, inputs.target, inputs.start, batches)
        if self._settings.lora is not None:
            add_adapters(drafter, self._settings.lora, self._settings.seed)
        return drafter

    def _build_sampler(self) -> Sampler:
        return Sampler(
            self._inputs.sequences,
            sequences_per_step=self._settings.batch.global_batch_size,
            rule=anchor_rule(self._settings),
            seed=self._settings.seed,
            narrow_steps=round(self._settings.batch.curriculum_fraction * self._num_steps),
        )

    def _take_steps(self, progress: Progress) -> None:
        settings, checkpoints = self._settings, self._checkpoints
        self._begin()
        state = self._state
        task = progress.add_task(total=self._num_steps, completed=state.step, **self._labels())
        while not self._is_over:
            self._take_step()
            total = round(state.step / self._share_done)
            progress.update(task, completed=state.step, total=total, **self._labels())
            if self._is_due(self._evaluation_interval) and not self._is_over:
                self._evaluate()
            writes = settings.checkpoint.every is not None
            if self._is_due(settings.checkpoint.every) or (writes and self._is_interrupted):
                checkpoints.save(self._trainer.engine, state)
            if self._is_interrupted and not self._is_over:
                self._end_interrupted(is_saved=writes)

    def _end_interrupted(self, *, is_saved: bool) -> NoReturn:
        """End the run after a signal, and log whether its state was saved."""
        if self._processes.is_first:
            step = f"step {self._state.step}"
            if self._settings.minutes is None:
                step += f" of {self._num_steps}"
            _logger.info(
                f"saved the run after {step}; the same command resumes it"
                if is_saved
                else f"the run ended after {step}, unsaved because checkpoint.every is null"
            )
        raise KeyboardInterrupt

    def _begin(self) -> None:
        """Resume from the last checkpoint, or test and evaluate the drafter of a new run."""
        settings = self._settings
        state = self._state = self._checkpoints.restore(self._trainer.engine)
        # The drafter in `best` may come from a later step than the checkpoint. Evaluations since
        # the checkpoint are repeated.
        state.add_kept(self._folder.best_state)
        self._elapsed = self._fraction_of(state.seconds)
        self._processes.wait()  # until all processes have read `best`, which may change below
        every = self._evaluation_interval = settings.evaluation.interval(
            self._num_steps, settings.batch.global_batch_size, self._evaluation.size
        )
        if state.step:
            _logger.info(f"the run resumes after step {state.step}")
        else:
            length, is_long = length_of(
                settings.with_steps(len(self._inputs.sequences)), len(self._inputs.sequences)
            )
            (_logger.warning if is_long else _logger.info)(length)
        if self._processes.is_first:
            self._metrics = MetricsLog(self._folder.path, state.step)
        if every is not None and not state.step:
            self._evaluate()

    def _take_step(self) -> None:
        started, state, trainer = perf_counter(), self._state, self._trainer
        rate = trainer.step(state.step, self._elapsed)
        state.step += 1
        seconds = state.seconds + self._seconds_unrecorded + perf_counter() - started
        self._elapsed = self._fraction_of(seconds)
        # Metrics are also recorded at each checkpoint, so that a resumed run records the same means
        # as an uninterrupted run.
        intervals = (self._settings.log_every, self._settings.checkpoint.every)
        is_recorded = any(self._is_due(every) for every in intervals)
        self._is_interrupted = self._interruption.is_requested(waits=is_recorded)
        is_recorded = is_recorded or self._is_interrupted
        is_checked = is_recorded or self._is_due(self._evaluation_interval)
        if is_checked:
            trainer.require_finite(self._checkpoints.latest())
        means = trainer.meter.read() if is_recorded else {}  # waits for the device
        self._seconds_unrecorded += perf_counter() - started
        if is_recorded:
            self._record(means | {"learning_rate": rate} | trainer.facts)

    def _evaluate(self) -> tuple[JakiroDrafter, JakiroDrafter, dict[str, Any]]:
        """Evaluate the drafter, export it if it is the best so far; return it with its metrics.

        The second drafter has the separate adapters, if there are any.
        """
        drafter, trained = self._trainer.copy_drafter()
        if self._evaluation.size:
            _logger.info(f"evaluating the drafter after step {self._state.step}")
        metrics = self._evaluation.measure(drafter)
        self._write({"evaluation": metrics})
        if summary := summary_of(metrics):
            _logger.info(f"step {self._state.step}: {summary}")
        score = next(iter(scores_of(metrics).items()), None)
        if score is not None and self._state.add_score(*score):
            self._exporter.keep_best(drafter, trained, metrics, self._state_now())
        return drafter, trained, metrics

    def _state_now(self) -> RunState:
        """Return the run's state, including the tokens and seconds since the last record."""
        state = self._state
        return replace(
            state,
            tokens=state.tokens + self._trainer.meter.count_tokens(),
            seconds=state.seconds + self._seconds_unrecorded,
        )

    def _is_due(self, every: int | None) -> bool:
        """Return whether the current step is a multiple of `every` or the last step of the run."""
        return every is not None and (self._state.step % every == 0 or self._is_over)

    @property
    def _share_done(self) -> float:
        """The completed fraction of the run, at most 1."""
        return min(1.0, max(self._state.step / self._num_steps, self._elapsed))

    @property
    def _is_over(self) -> bool:
        """Whether the run takes no further steps."""
        return self._share_done == 1

    def _fraction_of(self, seconds: float) -> float:
        """Return the passed fraction of the run's time limit, the same in all processes."""
        if (minutes := self._settings.minutes) is None:
            return 0.0
        return self._processes.gather(seconds)[0] / (60 * minutes)

    def _record(self, facts: dict[str, Any]) -> None:
        speed = {"tokens_per_second": facts["tokens"] / self._seconds_unrecorded}
        self._state.tokens += facts["tokens"]
        self._state.seconds += self._seconds_unrecorded
        self._seconds_unrecorded = 0.0
        self._state.losses = facts | speed
        self._write(self._state.losses)

    def _write(self, facts: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(self._state.step, facts)

    def _labels(self) -> dict[str, Any]:
        """Return the texts of the progress bar, which are those of the last record."""
        losses = self._state.losses
        if not losses:
            return {"description": "drafter", "rate": ""}
        agreement = " ".join(f"{level['agreement']:.2f}" for level in losses["levels"])
        return {
            "description": f"drafter: loss {losses['loss']:.3f}, agreement {agreement}",
            "rate": f"{losses['tokens_per_second']:,.0f} tokens/s",
        }
