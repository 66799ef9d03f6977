"""The drafter: memory encoder, trunk and mixture of experts as one Hugging Face model."""

import shlex
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from jakiro.config import (
    JakiroConfig,
    encoder_arguments,
    experts_arguments,
    masks_arguments,
    state_sources,
    trunk_arguments,
    undone_rotation,
)
from jakiro.draft_head import DraftHead
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import CheckpointError, JakiroError
from jakiro.experts import ExpertsOutput, MixtureOfExperts, mean_over_components
from jakiro.levels import HiddenTransfer, LevelHeads, LevelMasks, PathFeatures, PathTables
from jakiro.target.cache import TargetState
from jakiro.target.ends import TargetEnds
from jakiro.target.weights import WeightForm
from jakiro.utils.devices import is_out_of_memory, too_little_memory
from jakiro.utils.fetch import KNOWN_MODELS, find_gguf
from jakiro.utils.packaged import packaged_drafter
from jakiro.utils.pretrained import LOADING_ERRORS, hub_options, reason_of
from moa.attention import Stores, no_history
from moa.layers import RMSNorm
from moa.memory import LayerMixture, MemoryEncoder
from moa.target_kv import with_rotated_keys
from moa.trunk import NUM_EARLIER, Trunk, TrunkInputs

_REMEDY = "check the path, or train a drafter with `jakiro train`"
_HUB_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "subfolder", "token")


class JakiroDrafter(PreTrainedModel):
    """Predicts the target's next features from tokens and the target's state at verified positions.

    The same `forward` serves training, evaluation and decoding. The output at position i predicts
    the target's feature at i, which determines the distribution of token i + 1. The output depends
    on the tokens up to i and on the target's state at verified positions. If the trunk reads
    features, the output also depends on the drafter's own predictions at the unverified positions
    before i. Parallel level k predicts the feature at i + k.

    Embeddings are the target's, and so is the head, unless the setting `experts.head` is `own`. The
    caller passes embedded tokens and computes logits with `draft_head`. The drafter contains no
    weights of the target.

    `draft_ids` [draft_vocab] holds the ids of the tokens that may be drafted, in ascending order,
    and is part of the checkpoint. `draft_ids` is None if all tokens may be drafted.

    `memory_shapes` holds the number of heads and the head size of each tensor that `encode_memory`
    returns.

    `attends_first` is the setting `trunk.first_position`. If it is False, callers mask the key of
    position 0 in self-attention. The first token is never drafted, so no query is at position 0.

    `num_earlier` is the number of tokens before each query whose embeddings the drafter reads in
    addition to those of the queries.

    Example:
        drafter = JakiroDrafter.from_pretrained(drafter_path)
        decoder = SpeculativeDecoder(target, drafter, tokenizer)
        output = decoder.generate("def main(", max_new_tokens=16)
    """

    config_class = JakiroConfig
    main_input_name = "embeddings"
    base_model_prefix = ""

    def __init__(self, config: JakiroConfig) -> None:
        super().__init__(config)
        settings, target = config.settings, config.target_record
        trunk, schedule, hidden = settings.trunk, settings.schedule, target.hidden_size
        self.state_sources = state_sources(settings, target)
        memory, features = encoder_arguments(config)
        self.memory_encoder = None if memory is None else _memory_encoder(settings, memory)
        self.undo_rotation = undone_rotation(config)
        self.feature_encoder = None if features is None else MemoryEncoder(**features)
        self.trunk = Trunk(**trunk_arguments(config))
        self.memory_shapes = self.trunk.memory_shapes
        if trunk.reads_features:
            self.memory_shapes.append((1, hidden))
        self.attends_first = trunk.first_position
        is_trigram, num_parallel = trunk.tokens == "trigram", schedule.parallel_levels
        self.num_earlier = NUM_EARLIER if is_trigram else int(schedule.heads == "branch")
        # Whether the target's last layers read the states of all levels, as in Hidden Transfer.
        self.transfers = schedule.heads == "transfer"
        self.experts = (
            HiddenTransfer(hidden, 1 + num_parallel)
            if self.transfers
            else MixtureOfExperts(**experts_arguments(config))
        )
        self.level_heads: LevelHeads | None = None
        if schedule.heads == "branch":
            width = settings.experts.intermediate_size
            self.level_heads = LevelHeads(hidden, width, num_parallel, settings.norm_eps)
        self.level_masks: LevelMasks | None = None
        if schedule.heads == "masks":
            self.level_masks = LevelMasks(**masks_arguments(config))
        self.path_features: PathFeatures | None = None
        if schedule.path in ("embedding", "recurrent"):
            is_recurrent = schedule.path == "recurrent"
            self.path_features = PathFeatures(hidden, num_parallel, is_recurrent)
        self.head_norm: torch.nn.Module | None = None
        if settings.experts.output_norm == "head":
            self.head_norm = RMSNorm(hidden, eps=settings.norm_eps)
        size = config.draft_vocab_size
        self.own_head: torch.nn.Linear | None = None
        if settings.experts.head == "own":
            num_drafted = target.vocab_size if size is None else size
            self.own_head = torch.nn.Linear(hidden, num_drafted, bias=False)
        self.path_tables: PathTables | None = None
        if schedule.path == "tables":
            num_drafted = target.vocab_size if size is None else size
            assert schedule.path_rank is not None, "the settings require it"
            self.path_tables = PathTables(target.vocab_size, num_drafted, schedule.path_rank)
        self.draft_ids: torch.Tensor | None
        self.register_buffer("draft_ids", None if size is None else torch.arange(size))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Do nothing, because each module initializes its own weights."""

    def encode_memory(
        self, state: TargetState, positions: Int[Tensor, "batch tokens"]
    ) -> tuple[Float[Tensor, "batch _ tokens _"], ...]:
        """Return the encoded memory of verified tokens, computed from the target's raw state.

        If the trunk attends to memory, the first two tensors are the keys and values of its
        cross-attention; a block has keys and values for each of its layers. If the trunk reads
        features, the last tensor holds the features; the feature of a token is an input at the next
        position.

        Args:
            state: the target's state, as returned by `state_sources.read`.
        """
        encoded: tuple[Tensor, ...] = ()
        if self.memory_encoder is not None:
            raw = state.memory
            if self.undo_rotation is not None and raw is not None:
                raw = with_rotated_keys(raw, -positions, self.undo_rotation)
            for kv in self.trunk.memory_kv(self.memory_encoder(raw), positions):
                encoded += kv
        if self.feature_encoder is not None:
            encoded += (self.feature_encoder(state.features).unsqueeze(1),)
        return encoded

    @property
    def knows_path(self) -> bool:
        """Whether the distribution of a parallel level depends on the token before it on a path."""
        return self.path_features is not None or self.path_tables is not None

    @property
    def levels(self) -> dict[str, int]:
        """The numbers of levels of the trees that the drafter is trained for, by their settings."""
        return self.config.settings.schedule.model_dump(
            include={"autoregressive_levels", "parallel_levels"}
        )

    def forward(
        self,
        embeddings: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        self_mask: Bool[Tensor, "batch 1 queries keys"],
        inputs: TrunkInputs,
        store: Stores = no_history,
        has_levels: bool = True,
        following: Float[Tensor, "batch queries parallel hidden"] | None = None,
    ) -> ExpertsOutput:
        """Return the predicted features of all levels for each query.

        Args:
            inputs: features of the positions before the queries, memory of verified tokens, and
                embeddings of `num_earlier` tokens before each query.
            store: function from the queries' own self-attention keys and values to all keys and
                values that the queries may attend to; with several layers of self-attention, one
                for each.
            has_levels: whether parallel levels are needed; without them, a pass may take less time.
            following: embeddings of the tokens after each query, with which parallel levels know
                their path; None if these tokens are not known yet (`path_features`).
        """
        given = (embeddings, positions, self_mask, inputs, store)
        if self.level_masks is not None and (has_levels or not self.level_masks.can_wait):
            output = self._of_levels(self.level_masks(self.trunk, *given), following)
        else:
            output = self.experts(self.trunk(*given))
        if self.level_heads is not None and has_levels:
            output = self.level_heads(output, embeddings, inputs)
        path = self.path_features
        if path is None or path.is_recurrent or following is None:
            return output
        return output._replace(features=path.below(output.features, following))

    def _of_levels(
        self, rows: Float[Tensor, "batch queries levels hidden"], following: Tensor | None
    ) -> ExpertsOutput:
        """Return the experts' output for the trunk's vectors of all levels.

        The components of all levels have the weights that the router gives them at the first one.
        """
        path, waiting = self.path_features, None
        if path is not None and path.is_recurrent:
            if following is not None:
                return self._along_path(rows, following, path)
            rows, waiting = rows[:, :, :1], rows
        output = self.experts(rows)
        return ExpertsOutput(
            output.features[..., 0, :, :],
            output.log_weights[:, :, 0],
            output.gate[:, :, 0],
            waiting=waiting,
        )

    def _along_path(
        self,
        rows: Float[Tensor, "batch queries levels hidden"],
        following: Float[Tensor, "batch queries parallel hidden"],
        path: PathFeatures,
    ) -> ExpertsOutput:
        """Return the experts' output, where each level reads the feature of the level before it."""
        output = self.experts(rows[:, :, 0])
        features = [output.features]
        for level, tokens in enumerate(following.unbind(2), start=1):
            before = mean_over_components(features[-1][:, :, 0], output.log_weights)
            vectors = rows[:, :, level] + path(tokens, level, before)
            features.append(self.experts(vectors).features)
        return output._replace(features=torch.cat(features, dim=2))

    def draft_head(self, target: TargetEnds, form: WeightForm = "own") -> DraftHead:
        """Return the head that turns features into logits of the tokens that may be drafted."""
        return DraftHead(target, self.draft_ids, form, self.head_norm, self.own_head)

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> "JakiroDrafter":  # type: ignore[override]
        """Load a drafter and check that its weights match its config exactly.

        Args:
            path: local folder, id on the Hugging Face hub, or name of a drafter in this package,
                such as `smollm2-135m-instruct`.

        Raises:
            CheckpointError: there is no drafter at `path`; its weights are not finite or do not
                match its config; or the ids of the tokens that may be drafted are invalid.
        """
        path = packaged_drafter(path) or path
        # With these options, transformers does not raise an error for mismatched weights, but
        # returns a report of them, which `_check_report` reads.
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        kwargs = hub_options(path) | kwargs
        try:
            _refuse_other_model(path, kwargs)
            loaded: Any = super().from_pretrained(str(path), **kwargs)
        except JakiroError:
            raise
        except LOADING_ERRORS as error:
            if is_out_of_memory(error):
                raise too_little_memory(f"the drafter {path}", error) from error
            raise CheckpointError(
                f"cannot load a drafter from {path}",
                expected="a folder or hub id with config.json and model.safetensors",
                got=reason_of(error, path),
                remedy=_REMEDY,
            ) from error
        drafter, report = loaded
        _check_report(report, path)
        _check_finite(drafter, path)
        _check_ids(drafter, path)
        return cast(JakiroDrafter, drafter)


def _memory_encoder(
    settings: DrafterSettings, arguments: dict[str, Any]
) -> MemoryEncoder | LayerMixture:
    if settings.memory.mixture == "none":
        return MemoryEncoder(**arguments)
    return LayerMixture(arguments["num_layers"], settings.trunk.num_layers, settings.norm_eps)


def _refuse_other_model(path: str | Path, load: dict[str, Any]) -> None:
    """Raise an error if a folder or hub id is that of another model, such as the target."""
    kind = "GGUF"
    if str(path) not in KNOWN_MODELS and find_gguf(path) is None:
        hub = {name: load[name] for name in _HUB_ARGUMENTS if name in load}
        config, _ = JakiroConfig.get_config_dict(str(path), **hub)
        kind = config.get("model_type", "")
        if kind in (JakiroConfig.model_type, ""):  # an incomplete config raises an error later
            return
    quoted = shlex.quote(str(path))
    raise CheckpointError(
        f"{path} is a {kind} model, not a drafter",
        expected="a drafter that `jakiro train` wrote, or the name of a training-free drafter",
        remedy="to decode with this model, use it as the target of a drafter that needs no "
        f"training: `jakiro generate lookup PROMPT --target {quoted}`; if it is a drafter of "
        f"another project, convert it first: `jakiro import {quoted}`",
    )


def _check_ids(drafter: JakiroDrafter, path: str | Path) -> None:
    """Raise an error unless `draft_ids` is None or holds ascending ids of the vocabulary."""
    ids, limit = drafter.draft_ids, drafter.config.target_record.vocab_size
    if ids is None:
        return
    if bool((ids.diff() <= 0).any()) or not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise CheckpointError(
            f"the list of tokens that may be drafted (draft_ids) in {path} is damaged",
            expected=f"ascending token ids from 0 to {limit - 1}",
            got=f"{len(ids)} ids from {int(ids.min())} to {int(ids.max())}",
            remedy="download or copy the checkpoint again",
        )


def _check_finite(drafter: JakiroDrafter, path: str | Path) -> None:
    bad = [name for name, value in drafter.named_parameters() if not value.isfinite().all()]
    if bad:
        raise CheckpointError(
            f"the drafter in {path} cannot draft",
            expected="weights that are finite numbers",
            got=f"infinite or undefined numbers in {', '.join(bad[:4])}",
            remedy="use another checkpoint of the training, or train again with a lower "
            "learning rate",
        )


def _check_report(report: dict[str, Any], path: str | Path) -> None:
    problems = {
        kind: sorted(map(str, report.get(kind) or ()))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    }
    if problems := {kind: keys for kind, keys in problems.items() if keys}:
        raise CheckpointError(
            f"the weights of the drafter in {path} do not match its config",
            expected="exactly the parameters that the config describes",
            got="; ".join(f"{kind}: {', '.join(keys[:4])}" for kind, keys in problems.items()),
            remedy="use the weights together with the config that they were saved with",
        )
