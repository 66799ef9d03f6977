"""The drafter together with its loss, as the one module that the DeepSpeed engine wraps."""

import torch
from torch import nn

from jakiro.drafter import JakiroDrafter
from training.batch import Batch
from training.objectives import Logits, LossTerms, ObjectiveSettings, drafter_loss
from training.views import TargetView, draft_all_positions


class TrainingModule(nn.Module):
    """Computes the summed loss of a batch; holds the drafter and nothing of the target.

    Args:
        drafter: the only part with parameters.
        settings: weights of the loss terms.
    """

    def __init__(self, drafter: JakiroDrafter, settings: ObjectiveSettings) -> None:
        super().__init__()
        self.drafter = drafter
        self.settings = settings

    def forward(self, view: TargetView, batch: Batch, logits: Logits) -> LossTerms:
        """Return the loss terms summed over all draws of anchors.

        Args:
            view: the frozen target's side of the batch, without gradients.
            batch: the packed rows.
            logits: `TargetAdapter.logits`; passed in so that no target weight is registered here.
        """
        terms = [
            drafter_loss(output, view.features, batch, draw, logits, self.settings)
            for draw, output in enumerate(draft_all_positions(self.drafter, view, batch))
        ]
        return LossTerms(*(torch.stack(column).sum(dim=0) for column in zip(*terms, strict=True)))
