"""Texts, data files, settings, batches and drafters for tests that train."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.models import tiny_drafter, tiny_llama
from torch import Tensor

from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.settings import merge, validate_settings
from training.config import TrainSettings
from training.data.packing import PackedSequence, collate
from training.data.token_store import TokenStore
from training.loop.metrics import read_metrics
from training.loss.anchors import AnchorRule, sample_anchors
from training.loss.batch import Batch, Examples, TargetView
from training.loss.objectives import LossTerms
from training.loss.settings import ObjectiveSettings
from training.module import TargetReader, TrainingModule

TEXTS = tuple(
    f"def add_{name}(first, second):\n    total = first + second * {number}\n    return total\n" * 3
    for number, name in enumerate(("one", "two", "three", "four", "five", "six", "seven", "eight"))
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


ROLLED_OUT = 3  # passes of a rollout in `batch_for`


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    """Write one record per line, and return the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def tiny_run(folder: Path, **changes: Any) -> TrainSettings:
    """Return the settings of a short run on the target and the texts in a folder, with changes."""
    base = {
        "target": {"name_or_path": str(folder / "target")},
        "data": {
            "paths": [str(folder / "texts.jsonl")],
            "sequence_length": 48,
            "validation_size": 2,
            "cache_folder": str(folder / "cache"),
        },
        "drafter": {
            "trunk": {"kind": "moa", "num_heads": 2, "num_kv_heads": 1, "head_dim": 16},
            "memory": {"num_heads": 2, "head_dim": 8, "mlp_width": 16},
            "experts": {"num_experts": 2, "intermediate_size": 32},
            "schedule": {"autoregressive_levels": 2, "parallel_levels": 1},
        },
        "initialize": {"attention_layer": None},
        "objective": {"token_weight": 1.0, "feature_weight": 0.0, "contrast_weight": 0.1},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "engine": {"autocast": False},  # the same on every processor
        "batch": {"global_batch_size": 4, "micro_batch_size": 2},
        "evaluation": {
            "every": None,
            "num_prompts": 1,
            "prompt_tokens": 8,
            "max_new_tokens": 8,
        },
        "checkpoint": {"every": 5},
        "steps": 10,
        "log_every": 1,
        "run_folder": str(folder / "run"),
    }
    return validate_settings(TrainSettings, merge(base, changes), source="the test")


def read_evaluations(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the evaluations of a run, each with the number of steps that preceded it."""
    lines = read_metrics(folder)
    return [(line["step"], line["evaluation"]) for line in lines if "evaluation" in line]


def curve(settings: TrainSettings) -> list[float]:
    """Return the recorded loss of each step."""
    return [line["loss"] for line in read_metrics(settings.run_folder) if "loss" in line]


def store_of(lengths: list[int], seed: int = 0) -> TokenStore:
    """Return a store of documents whose token ids are all different."""
    starts = np.cumsum([0, *lengths])
    token_ids = np.arange(starts[-1], dtype=np.int32)
    return TokenStore(token_ids, np.ones(len(token_ids), np.bool_), starts, "any")


def random_batch(
    *sequences: Sequence[int],
    sequence_length: int = 24,
    samples: int = 1,
    vocab: int = 61,
    seed: int = 0,
) -> Batch:
    """Return a batch of packed documents of random tokens, all of which are responses."""
    random = np.random.default_rng(seed)
    batch = []
    for number, lengths in enumerate(sequences):
        padding = sequence_length - sum(lengths)
        documents = np.repeat([*range(len(lengths)), -1], [*lengths, padding])
        positions = np.concatenate([np.arange(length) for length in (*lengths, padding)])
        tokens = random.integers(0, vocab, sequence_length)
        packed = PackedSequence(tokens, positions, documents, documents >= 0)
        starts = packed.document_starts
        keys = [(seed, number, sample) for sample in range(samples)]
        batch.append((packed, np.stack([sample_anchors(starts, 2, key) for key in keys])))
    return collate(batch)


def batch_for(
    settings: DrafterSettings, *sequences: Sequence[int], sequence_length: int = 24, seed: int = 0
) -> Batch:
    """Return a random batch with the anchors that training samples for a drafter."""
    batch = random_batch(*sequences, sequence_length=sequence_length, seed=seed)
    kind, samples = "drafting", 2
    if settings.trunk.reads_features:
        kind, samples = "ttt", ROLLED_OUT
    elif settings.tail_layers:
        kind = "blocks"
    rule = AnchorRule(kind, num_levels=3, num_samples=samples)
    starts = (torch.arange(sequence_length) - batch.positions).numpy()
    anchors = [torch.from_numpy(rule.anchors(own, (seed, n))) for n, own in enumerate(starts)]
    return Batch(**(vars(batch) | {"anchors": torch.stack(anchors)}))


def one_document(tokens: Tensor, anchors: Tensor) -> Batch:
    """Return a batch of one document of responses; `anchors` has the shape [samples, length]."""
    count = tokens.shape[1]
    return Batch(
        token_ids=tokens,
        positions=torch.arange(count)[None],
        documents=torch.zeros(1, count, dtype=torch.long),
        is_response=torch.ones(1, count, dtype=torch.bool),
        anchors=anchors.reshape(1, -1, count),
        is_narrow=torch.zeros(1, dtype=torch.bool),
    )


def cropped(batch: Batch, begin: int, end: int) -> Batch:
    """Return the batch cut to the positions from `begin` to before `end` of its sequences."""
    columns = vars(batch) | {
        name: column[..., begin:end] for name, column in vars(batch).items() if column.ndim > 1
    }
    return Batch(**columns)


@dataclass
class TinyTraining:
    """A tiny target and a drafter for it, with the loss of batches."""

    drafter: JakiroDrafter
    target: TargetAdapter
    objective: ObjectiveSettings

    def view(self, batch: Batch) -> TargetView:
        """Return the target's outputs for a batch."""
        return self.reader(batch.token_ids.shape[1]).view(batch)

    def reader(self, sequence_length: int) -> TargetReader:
        """Return a reader of the target states that the drafter needs."""
        return TargetReader(self.target, self.drafter, sequence_length, torch.float32)

    def loss(self, batch: Batch, **changes: object) -> LossTerms:
        """Return the loss terms of a batch, with changes to the objective."""
        reader = self.reader(batch.token_ids.shape[1])
        return self.module(**changes)(reader.view(batch), batch, reader)

    def module(self, **changes: object) -> TrainingModule:
        """Return the module that computes the loss, with changes to the objective."""
        return TrainingModule(self.drafter, self.objective.model_copy(update=changes))

    def gradients(self, total: Tensor) -> list[Tensor]:
        """Return the gradient of each of the drafter's parameters; None for unused parameters."""
        return list(torch.autograd.grad(total, list(self.drafter.parameters()), allow_unused=True))


def tiny_training(settings: DrafterSettings | None = None) -> TinyTraining:
    """Return a random target and drafter, by default with `tiny_settings()`."""
    target = TargetAdapter(tiny_llama().requires_grad_(False))
    objective = ObjectiveSettings(feature_weight=0.3, contrast_weight=0.1, distance_decay=0.9)
    return TinyTraining(tiny_drafter(target, settings), target, objective)


def examples_of(
    features: Tensor, log_weights: Tensor, targets: Tensor, next_tokens: Tensor
) -> Examples:
    """Return positions of one sequence, all of which carry a loss at every level."""
    count, levels = features.shape[:2]
    return Examples(
        features=features,
        log_weights=log_weights,
        gate=log_weights.exp(),
        targets=targets,
        next_tokens=next_tokens,
        valid=torch.ones(count, levels, dtype=torch.bool),
        weight=torch.ones(count),
        sequence_sizes=(count,),
        indices=torch.arange(count),
    )
