"""Formats of the weights that a trained drafter computes with on a CPU."""

from typing import Literal

from jakiro.draft_head import HeadForm, allows_form
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.ends import TargetEnds
from jakiro.target.packed_linear import can_pack
from jakiro.utils.settings import Settings

_HEAD_FORMS: tuple[HeadForm, ...] = ("own", "packed", "int8")


class DraftForms(Settings):
    """Formats of the weights that a trained drafter computes with.

    Every format gives the same distribution of the output, because a candidate is accepted by the
    probability with which it was drafted. Formats other than the own format of the weights need
    memory for copies of the weights.
    """

    # format of the head's rows: own, packed (reordered for the CPU), or int8 (the inputs are
    # quantized, too, so that fewer drafts may be accepted)
    head: HeadForm = "own"
    packed: bool = False  # whether the drafter's linear layers compute with reordered weights


OWN_FORMS = DraftForms()

FormChoice = DraftForms | Literal["auto"]  # "auto": the fastest formats on this machine


def head_forms(target: TargetEnds, model: JakiroDrafter | None = None) -> tuple[HeadForm, ...]:
    """Return the formats of the draft head that a target, a drafter and this machine allow.

    Args:
        target: target whose head is used, unless the drafter has its own.
        model: drafter; None for one without a head of its own.
    """
    own = None if model is None else model.own_head
    head = target.head if own is None else own
    return tuple(form for form in _HEAD_FORMS if allows_form(head, form))


def can_pack_layers(model: JakiroDrafter) -> bool:
    """Return whether a drafter's linear layers can be packed, which excludes compiled drafters.

    Args:
        model: drafter, on its final device.
    """
    return model._compiled_call_impl is None and can_pack(model)


def check_forms(forms: DraftForms, target: TargetEnds, model: JakiroDrafter) -> None:
    """Raise an error if a drafter cannot compute with the given formats of weights.

    Args:
        forms: requested formats of the weights.
        target: target whose head is used.
        model: drafter, on its final device.

    Raises:
        ConfigError: the machine, the target's head or the drafter does not allow a format.
    """
    allowed = head_forms(target, model)
    if forms.head not in allowed:
        raise _refused(f"head={'|'.join(allowed)}", f"head={forms.head}")
    if forms.packed and not can_pack_layers(model):
        raise _refused("packed=False", "packed=True")


def _refused(expected: str, got: str) -> ConfigError:
    return ConfigError(
        "the drafter cannot compute with these formats of weights on this machine",
        expected=expected,
        got=got,
        remedy='use draft_forms="auto", which selects a format that is possible',
    )
