"""The fastest formats of a trained drafter's weights on this machine, measured once."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from inference.autotune.costs import facts_of
from inference.autotune.measurement import cached, seconds_of, target_facts
from inference.drafters.trained.converted import layer_forms, layer_product, sources
from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.forms import (
    DraftForms,
    FormChoice,
    head_forms,
)
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.weight_forms import WeightForm
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import Settings

ROWS = 4  # number of nodes that one drafter pass reads during timing
# Number of repetitions; the first is a warm-up, in which the draft head also copies the rows of the
# draft vocabulary.
REPEATS = 7
# The format int8 must be this many times as fast as the best other format, because fewer drafts may
# be accepted.
LEAST_GAIN = 1.2

_Name = TypeVar("_Name")

_logger = get_logger(__name__)


def with_forms(
    drafter: TrainedDrafter, forms: FormChoice, folder: Path | None = None
) -> TrainedDrafter:
    """Return a drafter that computes with the given formats of weights."""
    if forms == "auto":
        assert isinstance(drafter.target, TargetAdapter), "a decoder has a whole target"
        forms = known_form_seconds(drafter.target, drafter.model, folder).fastest
    return drafter.in_forms(forms)


class FormSeconds(Settings):
    """The measured seconds of a drafter's head and layers in each possible format.

    Attributes:
        head: seconds in which the head scores the candidates below some nodes; empty if the weights
            have a single possible format.
    """

    head: Mapping[WeightForm, float] = Field(default_factory=dict)
    layers: Mapping[WeightForm, float] = Field(default_factory=dict)

    @property
    def fastest(self) -> DraftForms:
        return DraftForms(head=fastest_form(self.head), layers=fastest_form(self.layers))


def known_form_seconds(
    target: TargetAdapter, model: JakiroDrafter, folder: Path | None = None
) -> FormSeconds:
    allowed = head_forms(target, model), layer_forms(model)
    if allowed == (("own",), ("own",)):
        return FormSeconds()
    key = [*target_facts(target), facts_of(model), allowed]
    return cached(FormSeconds, "forms", key, lambda: measure_forms(target, model), folder)


@torch.inference_mode()
def measure_forms(target: TargetAdapter, model: JakiroDrafter) -> FormSeconds:
    _logger.info("measuring the fastest formats of the drafter's weights on this machine")
    heads = {form: _head_work(target, model, form) for form in head_forms(target, model)}
    layers = {form: _layer_work(model, form) for form in layer_forms(model)}
    return FormSeconds(head=_medians(heads), layers=_medians(layers))


def fastest_form(seconds: Mapping[WeightForm, float]) -> WeightForm:
    """Return the fastest format of the head or of the layers.

    Int8 is returned only if it is `LEAST_GAIN` times as fast as the best other format.
    """
    if not seconds:
        return "own"
    others = {form: taken for form, taken in seconds.items() if form != "int8"}
    best = min(others, key=others.__getitem__)
    if seconds.get("int8", float("inf")) * LEAST_GAIN <= seconds[best]:
        return "int8"
    return best


def _head_work(
    target: TargetAdapter, model: JakiroDrafter, form: WeightForm
) -> Callable[[], object]:
    head = model.draft_head(target, form)
    features = torch.randn(ROWS, target.spec.hidden_size, dtype=target.dtype, device=target.device)
    return partial(head.logits, features)


def _layer_work(model: JakiroDrafter, form: WeightForm) -> Callable[[], object]:
    """Return a function that computes with every layer of a drafter once."""
    layers = [(layer_product(source, form), _rows_for(source)) for source in sources(model)]
    return lambda: [product(rows) for product, rows in layers]


def _rows_for(source: nn.Linear | nn.Parameter) -> Tensor:
    """Return random inputs of a linear layer, or of a stack of experts' matrices."""
    weight = source.weight if isinstance(source, nn.Linear) else source
    shape = weight.shape[1:] if isinstance(source, nn.Linear) else weight.shape[-3:-1]
    return torch.randn(ROWS, *shape, dtype=weight.dtype, device=weight.device)


def _medians(works: Mapping[_Name, Callable[[], object]]) -> dict[_Name, float]:
    """Return the median seconds of each function; the functions take turns."""
    times: dict[_Name, list[float]] = {name: [] for name in works}
    for _ in range(REPEATS):
        for name, work in works.items():
            times[name].append(seconds_of(work))
    return {name: median(several[1:]) for name, several in times.items()}
