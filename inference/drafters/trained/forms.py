"""Formats of the weights that a trained drafter computes with on a CPU."""

from typing import Literal

from inference.drafters.trained.converted import layer_forms
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.ends import TargetEnds
from jakiro.target.weight_forms import WEIGHT_FORMS, WeightForm, allows_form
from jakiro.utils.settings import Settings


class DraftForms(Settings):
    """Formats of the weights that a trained drafter computes with.

    Every format gives the same distribution of the output, because a candidate is accepted by the
    probability with which it was drafted. The formats are `own` (as loaded), `packed` (reordered
    for the CPU), `bfloat16` (reordered copies of float32 weights with 16 bits), and `int8` (weights
    and inputs are quantized to 8 bits, so that fewer drafts may be accepted). Formats other than
    `own` need memory for copies of the weights.
    """

    head: WeightForm = "own"  # format of the rows of the head that scores candidates
    # format of the drafter's linear layers and of the output matrices of its experts
    layers: WeightForm = "own"


OWN_FORMS = DraftForms()
_FASTEST_FIRST: tuple[WeightForm, ...] = ("bfloat16", "packed", "own")

# "auto": as few bytes as the weights have without being quantized, in the order of the processor.
FormChoice = DraftForms | Literal["auto"]


def head_forms(target: TargetEnds, model: JakiroDrafter | None = None) -> tuple[WeightForm, ...]:
    """Return the formats of the draft head that a target, a drafter and this machine allow."""
    own = None if model is None else model.own_head
    head = target.head if own is None else own
    return tuple(form for form in WEIGHT_FORMS if allows_form(head, form))


def fastest_forms(target: TargetEnds, model: JakiroDrafter) -> DraftForms:
    """Return the fastest formats on this machine other than int8."""

    def best(allowed: tuple[WeightForm, ...]) -> WeightForm:
        return next(form for form in _FASTEST_FIRST if form in allowed)

    return DraftForms(head=best(head_forms(target, model)), layers=best(layer_forms(model)))


def check_forms(forms: DraftForms, target: TargetEnds, model: JakiroDrafter) -> None:
    """Raise an error if a drafter cannot compute with the given formats of weights."""
    allowed = {"head": head_forms(target, model), "layers": layer_forms(model)}
    for part, possible in allowed.items():
        if (form := getattr(forms, part)) not in possible:
            raise ConfigError(
                "the drafter cannot compute with these formats of weights on this machine",
                expected=f"{part}={'|'.join(possible)}",
                got=f"{part}={form}",
                remedy='use draft_forms="auto", which selects a format that is possible',
            )
