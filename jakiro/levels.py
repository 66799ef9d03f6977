"""Networks that predict several levels of a draft tree in one pass."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jakiro.experts import ExpertsOutput
from moa import PredictsFrom
from moa.attention import KV, KVStore, Stores, after
from moa.layers import FeedForward, RMSNorm
from moa.trunk import Trunk, TrunkInputs


class LevelHeads(nn.Module):
    """One MLP per parallel level, which reads the end of a path (Gumiho, arXiv 2503.10135).

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
        mean = output.mean_feature
        tokens = self.token_norm(inputs.earlier[:, :, 0]), self.token_norm(embeddings)
        features = self.feature_norm(inputs.previous), self.feature_norm(mean)
        pairs = torch.cat((tokens[0], features[0], tokens[1], features[1]), dim=-1)
        levels = [
            network(mean + join(pairs))
            for join, network in zip(self.joins, self.networks, strict=True)
        ]
        components = output.features.shape[-2]
        added = torch.stack(levels, dim=-2).unsqueeze(-2).expand(-1, -1, -1, components, -1)
        return output._replace(features=torch.cat((output.features, added), dim=-3))


class LevelMasks(nn.Module):
    """One trained mask per parallel level, which the trunk reads (ParallelSpec, arXiv 2410.05589).

    The trunk runs once, for queries and for the masks behind each query.

    Masks take the places of tokens that are not drafted yet. Each has a trained embedding, and a
    trained vector in place of the feature that is not known:

        position            i            i + 1     i + 2
        token               x_i          m_1       m_2
        feature             f_{i-1}      g_1       g_2
        the output predicts f_i          f_{i+1}   f_{i+2}

    A mask attends to all that its query attends to, to itself, and to the masks before it behind
    the same query. Queries attend to no mask, and the keys and values of masks are not stored.

    The rows of a block (DFlash, arXiv 2602.06036) differ as follows: all rows of a block attend to
    each other, unless it is causal; masks read the feature that their query reads; and with
    `predicts_from` "masks", one more mask takes the place of the query, whose output is not read:

        position            i            i + 1     i + 2
        the output predicts              f_i       f_{i+1}

    Args:
        features: vectors in place of the features of masks: "trained", those of the "query", or
            "none" if the trunk reads no features.
        is_causal: whether masks attend to earlier rows only, and queries to no mask.
        embedding: "trained" for one embedding per mask; "token" for a constant, the target's
            embedding of a mask token, which an import or a new training sets.
    """

    def __init__(
        self,
        hidden: int,
        num_levels: int,
        features: Literal["trained", "query", "none"] = "none",
        is_causal: bool = True,
        predicts_from: PredictsFrom = "all",
        embedding: Literal["trained", "token"] = "trained",
    ) -> None:
        super().__init__()
        self.drafts_at_query = predicts_from == "all"
        self.is_causal = is_causal
        self.num_masks = num_levels + (not self.drafts_at_query)
        if embedding == "trained":
            self.tokens = nn.Parameter(0.02 * torch.randn(self.num_masks, hidden))
        else:
            self.register_buffer("tokens", torch.zeros(1, hidden))
        self.features: nn.Parameter | None = None
        self.repeats_features = features == "query"
        if features == "trained":
            self.features = nn.Parameter(0.02 * torch.randn(self.num_masks, hidden))

    @property
    def can_wait(self) -> bool:
        """Whether a query's own prediction is the same without masks behind it."""
        return self.is_causal and self.drafts_at_query

    def forward(
        self,
        trunk: Trunk,
        embeddings: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        self_mask: Bool[Tensor, "batch 1 queries keys"],
        inputs: TrunkInputs,
        store: Stores,
    ) -> Float[Tensor, "batch queries levels hidden"]:
        """Return the trunk's vectors of all levels for each query."""
        count = embeddings.shape[1]
        ahead = torch.arange(1, 1 + self.num_masks, device=positions.device)
        stream = trunk(
            self._with_masks(embeddings, self.tokens),
            torch.cat((positions, (positions[:, :, None] + ahead).flatten(1)), dim=1),
            self._mask_with_masks(self_mask),
            self._inputs(inputs),
            tuple(_stored_up_to(count, layer) for layer in trunk.stores(store)),
        )
        rows = stream[:, count:].unflatten(1, (count, self.num_masks))
        if self.drafts_at_query:
            rows = torch.cat((stream[:, :count, None], rows), dim=2)
        return rows

    def _with_masks(self, vectors: Tensor, masks: Tensor) -> Tensor:
        """Return the vectors of queries, followed by the masks behind each query."""
        batch, count, hidden = vectors.shape
        behind = masks.to(vectors.dtype).expand(batch, count, self.num_masks, hidden)
        return torch.cat((vectors, behind.flatten(1, 2)), dim=1)

    def _mask_with_masks(self, visible: Tensor) -> Tensor:
        """Return the mask of self-attention: the keys are those of the store, then the masks."""
        count = visible.shape[2]
        masks = group_mask(count, self.num_masks, visible.device, self.is_causal)
        of_queries = torch.zeros_like(masks[:count])
        if not self.is_causal:
            of_queries = masks[:: self.num_masks]
        masks = torch.cat((of_queries, masks))
        return torch.cat((self._behind(visible), masks.expand(len(visible), 1, -1, -1)), dim=3)

    def _inputs(self, inputs: TrunkInputs) -> TrunkInputs:
        previous, mask = inputs.previous, inputs.mask
        if previous is not None and self.repeats_features:
            previous = self._with_masks(previous, previous.unsqueeze(2))
        elif previous is not None and self.features is not None:
            previous = self._with_masks(previous, self.features)
        mask = None if mask is None else self._behind(mask)
        return inputs._replace(previous=previous, mask=mask)

    def _behind(self, visible: Tensor) -> Tensor:
        """Return what queries may attend to, followed by the same for the masks behind them."""
        return torch.cat((visible, visible.repeat_interleave(self.num_masks, dim=2)), dim=2)


def _stored_up_to(count: int, store: KVStore) -> KVStore:
    """Return a store that keeps the first `count` keys and values, and appends the others."""

    def join(kv: KV) -> KV:
        kept = store(KV(kv.keys[:, :, :count], kv.values[:, :, :count]))
        return after(kept)(KV(kv.keys[:, :, count:], kv.values[:, :, count:]))

    return join


def group_mask(
    count: int, levels: int, device: torch.device, is_causal: bool = True
) -> Bool[Tensor, "rows rows"]:
    """Return True where a row may attend to another one: in its group, by default up to itself."""
    group = torch.arange(count * levels, device=device)
    same = group[:, None] // levels == group // levels
    return same & (group <= group[:, None]) if is_causal else same


class PathFeatures(nn.Module):
    """Tells a parallel level which token precedes it on the path.

    A parallel level k is predicted before the token c before it is known. Its feature below c is

        h_{k|c} = h_k + R_k E(c),    E(c): the target's embedding of c,

    from which the head computes the draft distribution below c. With the head's rows w, this adds
    `w_x^T R_k E(c)` to the logit of each token x: a first-order Markov head (DSpark, arXiv
    2607.05147) without tables of its own, which knows no more of the path than c. A recurrence over
    the levels knows the whole path: it also reads the feature g from which c was drafted (averaged
    over components), and shifts the trunk's vector x_k, which the experts read afterwards:

        h_{k|c} = experts(x_k + R_k E(c) + S_k g)

    At first, the matrices R_k and S_k are 0.
    """

    def __init__(self, hidden: int, num_levels: int, is_recurrent: bool = False) -> None:
        super().__init__()
        self.is_recurrent = is_recurrent
        width = 2 * hidden if is_recurrent else hidden
        self.shifts = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(num_levels))
        for weight in self.shifts.parameters():
            nn.init.zeros_(weight)

    def forward(
        self,
        embeddings: Float[Tensor, "*batch hidden"],
        level: int,
        drafted_from: Float[Tensor, "*batch hidden"] | None = None,
    ) -> Float[Tensor, "*batch hidden"]:
        """Return the shift of a parallel level, from 1, below each token c.

        Args:
            drafted_from: the features g of a recurrence.
        """
        if drafted_from is not None:
            embeddings = torch.cat((embeddings, drafted_from), dim=-1)
        shift: Tensor = self.shifts[level - 1](embeddings)
        return shift

    def below(
        self,
        levels: Float[Tensor, "batch queries levels components hidden"],
        following: Float[Tensor, "batch queries parallel hidden"],
    ) -> Float[Tensor, "batch queries levels components hidden"]:
        """Return the features of all levels, those of parallel levels below known tokens.

        Args:
            following: embeddings of the tokens at the positions after each query's own.
        """
        tokens = following.unbind(2)
        shifts = torch.stack([self(part, 1 + index) for index, part in enumerate(tokens)], dim=2)
        return torch.cat((levels[:, :, :1], levels[:, :, 1:] + shifts.unsqueeze(3)), dim=2)


class PathTables(nn.Module):
    """A Markov head with tables of its own, in the form of published drafters (DSpark).

    Below a token c, at every level, the logit of each token x of the draft vocabulary has the
    additional term `<w2_x, w1_c>`.
    """

    def __init__(self, vocab_size: int, drafted: int, rank: int) -> None:
        super().__init__()
        self.of_parent = nn.Embedding(vocab_size, rank)
        self.of_child = nn.Linear(rank, drafted, bias=False)

    def forward(self, token_ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch drafted"]:
        """Return what each token adds to the logits of the tokens below it."""
        logits: Tensor = self.of_child(self.of_parent(token_ids))
        return logits


class HiddenTransfer(nn.Module):
    """One matrix per level, from a hidden state of the target to those of the next positions.

    Hidden Transfer (arXiv 2404.12022) takes the place of the experts. The state at the input of the
    target's last layers is all that is read:

        position            i - 1        i          i + 1
        state               h_{i-1}      W_0 h      W_1 h
        after the layers    known        predicts f_i, then f_{i+1}

    The published method runs these rows beside those of the nodes that the target verifies. No node
    attends to such a row, so they are the same in a pass of their own, which needs them for
    the last verified token only.
    """

    beta = None  # there is no contrast between experts

    def __init__(self, hidden: int, num_levels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(hidden).repeat(num_levels, 1, 1))

    def forward(self, stream: Float[Tensor, "batch queries hidden"]) -> ExpertsOutput:
        """Return the states of all levels, to which the last layers must still be applied."""
        states = torch.einsum("lgh,bqh->bqlg", self.weight, stream)
        one = torch.ones_like(stream[..., :1])
        return ExpertsOutput(states.unsqueeze(3), torch.zeros_like(one), one)


class PseudoRows(NamedTuple):
    """The states of all levels as queries of the target's last layers.

    Attributes:
        states: states of all levels of the first query, then of the second one, and so on.
        own: True where a state may attend to another one: to the earlier levels of its query.
    """

    states: Float[Tensor, "batch rows hidden"]
    positions: Int[Tensor, "batch rows"]
    own: Bool[Tensor, "batch rows rows"]

    @classmethod
    def of(cls, output: ExpertsOutput, positions: Int[Tensor, "batch queries"]) -> "PseudoRows":
        """Return the states of all levels."""
        batch, count, levels = output.features.shape[:3]
        ahead = torch.arange(levels, device=positions.device)
        own = group_mask(count, levels, positions.device).expand(batch, -1, -1)
        return cls(
            output.features[:, :, :, 0].flatten(1, 2),
            (positions[:, :, None] + ahead).flatten(1),
            own,
        )


def with_features(
    output: ExpertsOutput, features: Float[Tensor, "batch rows hidden"]
) -> ExpertsOutput:
    """Return an output whose states are replaced by the features that the last layers computed.

    Args:
        features: output of the last layers for `PseudoRows.of(output, ...)`.
    """
    return output._replace(features=features.unflatten(1, output.features.shape[1:3])[..., None, :])
