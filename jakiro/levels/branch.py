"""One MLP per parallel level, which reads the end of a path (Gumiho, arXiv 2503.10135)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jakiro.experts import ExpertsOutput
from moa.feed_forward import FeedForward
from moa.norm import RMSNorm
from moa.trunk import TrunkInputs


class LevelHeads(nn.Module):
    """Adds parallel levels to the output of experts.

    At position i, the head of level k reads the last two tokens of a path, each with the feature
    that was known or predicted after it:

        position            i - 1            i
        token               x_{i-1}          x_i
        feature             f_{i-1}          F1, the experts' mean feature

    It predicts `FF_k(F1 + W_k [norm(x_{i-1}); norm(f_{i-1}); norm(x_i); norm(F1)])`, where `FF_k`
    is a feed-forward network with a residual connection. All components of a level are equal.
    """

    def __init__(self, hidden: int, width: int, num_levels: int, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.token_norm = RMSNorm(hidden, eps=norm_eps)
        self.feature_norm = RMSNorm(hidden, eps=norm_eps)
        self.joins = nn.ModuleList(
            nn.Linear(4 * hidden, hidden, bias=False) for _ in range(num_levels)
        )
        self.networks = nn.ModuleList(
            FeedForward(hidden, width, norm_eps) for _ in range(num_levels)
        )

    def forward(
        self,
        output: ExpertsOutput,
        embeddings: Float[Tensor, "batch queries hidden"],
        inputs: TrunkInputs,
    ) -> ExpertsOutput:
        """Return the output with one more level per head."""
        assert inputs.previous is not None
        assert inputs.earlier is not None
        own = output.mean_feature
        tokens = self.token_norm(inputs.earlier[:, :, 0]), self.token_norm(embeddings)
        features = self.feature_norm(inputs.previous), self.feature_norm(own)
        pairs = torch.cat((tokens[0], features[0], tokens[1], features[1]), dim=-1)
        levels = [
            network(own + join(pairs))
            for join, network in zip(self.joins, self.networks, strict=True)
        ]
        components = output.features.shape[-2]
        added = torch.stack(levels, dim=-2).unsqueeze(-2).expand(-1, -1, -1, components, -1)
        return output._replace(features=torch.cat((output.features, added), dim=-3))
