"""The drafter together with its loss, as the one module that the DeepSpeed engine wraps."""

import torch
from torch import nn

from jakiro.drafter import JakiroDrafter
from training.batch import Batch
from training.drafting import draft_all_positions
from training.objectives import Goals, LossTerms, ObjectiveSettings, drafter_loss
from training.target_reader import TargetReader
from training.views import TargetView


class TrainingModule(nn.Module):
    """Computes the summed loss of a batch; holds the drafter and nothing of the target.

    Args:
        drafter: the only part with parameters.
        settings: weights of the loss terms.
        recompute: whether backward computes the drafter's activations again instead of keeping
            them.
    """

    def __init__(
        self, drafter: JakiroDrafter, settings: ObjectiveSettings, recompute: bool = False
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.settings = settings
        self._recompute = recompute

    def forward(self, view: TargetView, batch: Batch, reader: TargetReader) -> LossTerms:
        """Return the loss terms summed over all draws of anchors.

        Args:
            view: the frozen target's side of the batch, without gradients.
            batch: the packed rows.
            reader: of the target; passed in so that no target weight is registered here.
        """
        outputs = draft_all_positions(self.drafter, view, batch, reader.tail, self._recompute)
        terms = [
            # Behind the target's last layers, their input is what is regressed.
            drafter_loss(
                output,
                Goals(view.features, view.tail_input, output.state),
                batch,
                draw,
                reader.heads,
                self.settings,
            )
            for draw, output in enumerate(outputs)
        ]
        return LossTerms(*(torch.stack(column).sum(dim=0) for column in zip(*terms, strict=True)))
