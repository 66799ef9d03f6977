"""The drafter together with its loss, as the one module that the DeepSpeed engine wraps."""

import torch
from torch import nn

from jakiro.drafter import JakiroDrafter
from jakiro.experts import BankOutput
from training.batch import Batch
from training.drafting import draft_all_positions, through_tail
from training.objectives import Goals, LossTerms, ObjectiveSettings, drafter_loss
from training.target_reader import TargetReader
from training.views import TargetView


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

    def forward(self, view: TargetView, batch: Batch, reader: TargetReader) -> LossTerms:
        """Return the loss terms summed over all draws of anchors.

        Args:
            view: the frozen target's side of the batch, without gradients.
            batch: the packed rows.
            reader: of the target; passed in so that no target weight is registered here.
        """
        terms = [
            self._loss_of(output, view, batch, draw, reader)
            for draw, output in enumerate(draft_all_positions(self.drafter, view, batch))
        ]
        return LossTerms(*(torch.stack(column).sum(dim=0) for column in zip(*terms, strict=True)))

    def _loss_of(
        self, output: BankOutput, view: TargetView, batch: Batch, draw: int, reader: TargetReader
    ) -> LossTerms:
        goals = Goals(view.features)
        if reader.tail is not None:
            # What is regressed is the input of the target's last layers, not what they make of it.
            goals = goals._replace(state=view.tail_input, predicted=output.expected)
            output = through_tail(output, reader.tail, view, batch, draw)
        return drafter_loss(output, goals, batch, draw, reader.heads, self.settings)
