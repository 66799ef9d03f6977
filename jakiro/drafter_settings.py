"""Settings of a drafter, which are read and checked without torch."""

from collections.abc import Container
from functools import reduce
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from jakiro.errors import ConfigError
from jakiro.target.attention_shape import AttentionShape
from jakiro.utils.rope import RopeSettings
from jakiro.utils.settings import Settings
from moa import AttentionBias, FusionNorm, InputKind, PredictsFrom, Residual, TokenInput


def _changed(settings: Settings) -> set[str]:
    """Return the names of the settings that are not at their defaults."""
    fields = type(settings).model_fields
    return {name for name, field in fields.items() if getattr(settings, name) != field.default}


# Settings of the way in which tokens and features are read.
_INPUT = {"input", "residual", "input_norms", "input_bias"}
# Settings with the names of arguments of `moa.trunk.Trunk`.
_FORM = _INPUT | {"attention_norm", "attention_bias", "qk_norm", "mlp_width"}
_FORM |= {"tokens", "num_layers"}
# Settings of trunks that read features.
_OF_FEATURES = _INPUT | {"fusion_layers", "fusion_norm", "ttt_steps"}


class BlockSettings(Settings):
    """The rows of a block, for trunk.kind block: the last token, and a mask for each later row."""

    causal: bool = False
    """Whether a row attends to earlier rows only, as in JetSpec; false: rows attend to each other,
    as in DFlash and DSpark."""
    reads_feature: bool = True
    """Whether the rows also read the target's feature before the last token, joined as trunk.input
    says. Only such a block can start as layers of the target."""
    predicts_from: PredictsFrom = "all"
    """Rows that predict tokens. all: the first row predicts the next token, as in DSpark; masks:
    each mask predicts the token in its own place, as in DFlash, which takes one row more."""
    mask_token: int | None = Field(None, ge=0)
    """Token whose embedding the masks read, as in DFlash; null: a trained vector for each mask."""


class TrunkSettings(Settings):
    """Inputs of the trunk and geometry of its attention."""

    kind: Literal["moa", "feedback", "hybrid", "block"] = "feedback"
    """Inputs of the trunk. moa: tokens and, through cross-attention, memory made from the target's
    states; no features are fed back. feedback: tokens and features; at positions that are not
    verified yet, the drafter's own predictions replace the target's features. hybrid: tokens,
    memory and features. block: one pass drafts all levels from the last token and masks, whose
    attention reads memory and the other rows together, in each of num_layers layers; this requires
    schedule.autoregressive_levels 1 and schedule.parallel_heads masks."""
    block: BlockSettings = BlockSettings()
    """The rows of trunk.kind block."""
    num_heads: int | None = Field(None, ge=1)
    """Number of query heads of each attention module. null: the same as in the target's last layer
    or, if a trunk cannot have the geometry of that layer (latent attention, for example), as many
    heads of size 64 as fit into the target's hidden size."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Number of key/value heads of each attention module; null: chosen in the same way as
    num_heads."""
    head_dim: int | None = Field(None, ge=2, multiple_of=2)
    """Size of each head; null: chosen in the same way as num_heads."""
    rope_theta: float | None = Field(None, gt=0)
    """Base (theta) of the rotary embedding; null: the same as in the target's last layer, or 10000
    if that is unknown."""
    rope: RopeSettings = RopeSettings()
    """Change of the rotary embedding for long contexts, as in some published drafters."""
    fusion_layers: tuple[int, ...] | None = None
    """For feedback and hybrid: indices of the hidden states that are fused into features, as in
    EAGLE-3 (0 is the embedding, k is the output of layer k); null to read only the last hidden
    state, as in EAGLE-2."""
    ttt_steps: int = Field(1, ge=1, le=8)
    """For feedback and hybrid: number of drafting steps that training simulates (training-time
    test). The first step reads the target's features; each later step reads features that the
    drafter predicted."""
    fusion_norm: FusionNorm = "none"
    """Norm of the hidden states before they are fused. none, each (each hidden state alone, as in
    EAGLE-3.1), or all (all hidden states together). Requires fusion_layers."""
    input: InputKind = "join"
    """For feedback and hybrid: way to read tokens and features. join: a matrix joins both, as in
    EAGLE-1 and EAGLE-2. wide: self-attention reads both side by side, and the residual stream
    starts with the feature, as in EAGLE-3; this requires attention_norm false."""
    residual: Residual = "feature"
    """With input wide: vector with which the residual stream starts. feature: the feature; normed:
    the normalized feature."""
    input_norms: bool = True
    """For feedback and hybrid: whether to normalize token embeddings and features before they are
    joined or read side by side."""
    input_bias: bool = True
    """For feedback and hybrid: whether the matrix that joins tokens and features, and the one that
    fuses hidden states, have a bias."""
    attention_norm: bool = True
    """Whether the input of self-attention is normalized; false in EAGLE-1, EAGLE-2 and Jakiro as
    published. If false, the trunk cannot start with the attention of a target layer."""
    attention_bias: AttentionBias = "none"
    """Projections of self-attention that have a bias. none, qkv (queries, keys and values, as in
    drafters for Qwen2), or all (these and the output)."""
    qk_norm: bool = False
    """Whether queries and keys of self-attention are normalized before their rotation, as in
    Qwen3."""
    mlp_width: int | None = Field(None, ge=1)
    """Inner width of a feed-forward network between self-attention and cross-attention, as in the
    Mixture of Attentions as published; null for no such network, because the experts follow the
    trunk."""
    tokens: TokenInput = "single"
    """Tokens that the trunk reads at each position. single: the token at this position. trigram:
    the last three tokens, which a small network turns into one vector, as in Chimera. With trigram,
    the trunk's attention can start with that of a target layer, but there is no fit."""
    num_layers: int = Field(1, ge=0, le=8)
    """Number of layers of self-attention, as in drafters with several layers (Gumiho has two). The
    feed-forward network between two of them is as wide as an expert; the experts follow the last
    layer. Trunks of kind feedback and block start as the target's last layers, and other trunks of
    several layers with random weights. 0: no token attends to
    another one, so levels are predicted from the last token and the feature before it, as in
    Medusa and in tensor-decomposed heads."""
    first_position: bool = True
    """Whether self-attention attends to the first token of a text. If false, this token takes no
    part in self-attention, as in EAGLE and vLLM; the trunk still reads its memory and features.
    This setting is part of the checkpoint, because a drafter must decode in the same way as it was
    trained."""

    @property
    def attends_memory(self) -> bool:
        """Whether the trunk has cross-attention to memory."""
        return self.kind != "feedback"

    @property
    def is_block(self) -> bool:
        """Whether one pass drafts all levels from rows that attend to memory and to each other."""
        return self.kind == "block"

    @property
    def reads_features(self) -> bool:
        """Whether the trunk reads features, including predictions that the drafter feeds back."""
        return self.block.reads_feature if self.is_block else self.kind != "moa"

    @property
    def geometry(self) -> dict[str, Any]:
        """The geometry that all attention modules of the trunk share, as keyword arguments."""
        return self.model_dump(include=set(AttentionShape.model_fields))

    @property
    def form(self) -> dict[str, Any]:
        """The other settings that determine the trunk's modules, as keyword arguments."""
        return self.model_dump(include=_FORM)

    def heads_for(self, attention: AttentionShape) -> AttentionShape:
        """Return the trunk's geometry for a target whose last layer has the geometry `attention`.

        Settings that are None are replaced by the target's values.
        """
        given = {name: value for name, value in self.geometry.items() if value is not None}
        heads = attention.model_copy(update=given)
        if heads.num_heads % heads.num_kv_heads:
            raise ConfigError(
                "drafter.trunk.num_heads must be a multiple of drafter.trunk.num_kv_heads",
                expected=f"a multiple of {heads.num_kv_heads} heads",
                got=heads.num_heads,
                remedy="set both numbers, or leave out both to use the target's",
            )
        return heads

    @model_validator(mode="after")
    def _heads_divide(self) -> "TrunkSettings":
        if self.num_heads and self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError("num_heads must be a multiple of num_kv_heads")
        return self

    @model_validator(mode="after")
    def _feedback_is_fed_back(self) -> "TrunkSettings":
        given = _OF_FEATURES & _changed(self)
        if given and not self.reads_features:
            names = ", ".join(sorted(given))
            raise ValueError(f"{names} can be set only if the trunk reads features")
        if self.block != BlockSettings() and not self.is_block:
            raise ValueError("block can be set only if trunk.kind is block")
        return self

    @model_validator(mode="after")
    def _wide_input_fits(self) -> "TrunkSettings":
        if self.input == "wide" and self.attention_norm:
            raise ValueError("input wide requires attention_norm false")
        if self.residual == "normed" and not (self.input == "wide" and self.input_norms):
            raise ValueError("residual normed requires input wide and input_norms true")
        if self.fusion_norm != "none" and self.fusion_layers is None:
            raise ValueError("fusion_norm requires fusion_layers")
        return self


class MemorySettings(Settings):
    """Memory made from the target's per-layer state (see `moa.memory`)."""

    source: Literal["kv", "hidden"] = "kv"
    """Target states that memory is made from. kv: keys and values of the target's layers. hidden:
    hidden states (0 is the embedding, the last one is the feature)."""
    layers: tuple[int, ...] | None = None
    """Indices of the layers (source kv) or hidden states (source hidden) to read. null: with source
    kv, all layers; with source hidden, an early, a middle and the last hidden state, or only the
    last one if layer_attention is false; for a block, an early and a middle one, and the inputs of
    as many of the target's last layers as the block has layers. Negative indices count from the
    end: of the hidden states, -1 is the last one, and -2 is the input of the last layer."""
    rotated: bool = True
    """With source kv: whether keys are read as they are cached, rotated by their positions. false:
    the rotation is undone first, for which all layers of the target must rotate whole keys alike.
    The position of a token then affects memory only through the target, and vLLM needs less memory
    to draft."""
    mixture: Literal["none", "per_layer"] = "none"
    """per_layer: each layer of a block reads its own mixture of the hidden states instead of the
    same memory, with one weight for each hidden state, as in DFlare. Requires source hidden and
    trunk.kind block."""
    layer_attention: bool = True
    """Whether the layers' states attend to each other (layer self-attention). If false, the states
    are concatenated and projected together; states that together are as wide as the target's hidden
    size, such as a single hidden state, are used unchanged unless common_width is set."""
    common_width: int | None = Field(None, ge=1)
    """Width to which the state of each layer is projected first; null to skip this projection."""
    output_bias: bool = True
    """Whether the matrix that makes memory of the states has a bias; false in DFlash."""
    num_heads: int = Field(2, ge=1)
    """Number of heads of the layer self-attention."""
    head_dim: int = Field(32, ge=2, multiple_of=2)
    """Size of each head of the layer self-attention."""
    mlp_width: int = Field(128, ge=1)
    """Width of the feed-forward part of the layer self-attention."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base (theta) of the rotary embedding of the layer index in the layer self-attention."""
    rope: RopeSettings = RopeSettings()
    """Change of this rotary embedding, as in drafters that were published with the rotary embedding
    of a target for long contexts."""

    @model_validator(mode="after")
    def _keys_are_read(self) -> "MemorySettings":
        if self.source == "hidden" and not self.rotated:
            raise ValueError("rotated can be false only if source is kv")
        if self.source == "kv" and self.mixture != "none":
            raise ValueError("mixture per_layer requires source hidden")
        if self.mixture != "none" and (self.layer_attention or self.common_width):
            raise ValueError("mixture per_layer requires layer_attention false and no common_width")
        return self


class ExpertsSettings(Settings):
    """The mixture of experts (see `jakiro.experts.MixtureOfExperts`)."""

    num_experts: Literal[1, 2, 4, 8, 16] = 1
    """Number of experts; 1 means an ordinary feed-forward layer."""
    active_experts: Literal[1, 2] | None = None
    """Number of experts that run for each drafted token, fewer than num_experts; the router chooses
    them, and drafting reads the weights of these experts only. null: all experts run."""
    intermediate_size: int = Field(1024, ge=1)
    """Width of the feed-forward network of each expert."""
    combine: Literal["sum", "mixture"] = "mixture"
    """Way to combine the experts. mixture: each expert predicts a feature, and the draft
    distribution is a mixture of one softmax per expert. sum: the experts together predict one
    feature, which has one softmax."""
    contrastive_head: bool = True
    """Whether the parallel levels use the difference between the experts' outputs."""
    output_norm: Literal["none", "head", "feedback"] = "none"
    """Norm of the predicted features. none: no norm; head: the draft head normalizes features, but
    they are fed back without a norm, as in EAGLE-3; feedback: the draft head and the feedback both
    use normalized features, as in EAGLE-3.1."""
    head: Literal["target", "own"] = "target"
    """Head that turns features into logits of the draft vocabulary. target: the target's head. own:
    a matrix of the drafter, which starts with the rows of the target's head, as in EAGLE-3; it
    adds draft_vocab_size times the hidden size parameters."""

    @model_validator(mode="after")
    def _some_experts_rest(self) -> "ExpertsSettings":
        if (self.active_experts or 0) >= self.num_experts:
            raise ValueError("active_experts must be smaller than num_experts, or null")
        return self

    @property
    def num_active(self) -> int:
        """The number of experts that run for each drafted token."""
        return self.num_experts if self.active_experts is None else self.active_experts

    @property
    def form(self) -> dict[str, Any]:
        """The settings of the mixture of experts, without the head, as keyword arguments."""
        return self.model_dump(exclude={"head"}) | {"output_norm": self.output_norm == "feedback"}


ParallelHeads = Literal["experts", "branch", "masks", "transfer"]

# The values of other settings of a drafter that networks of parallel levels require.
_REQUIRED: dict[ParallelHeads, dict[str, Container[object]]] = {
    "experts": {},
    "branch": {"trunk.kind": ("feedback", "hybrid"), "experts.output_norm": ("none", "head")},
    "masks": {
        "trunk.tokens": ("single",),
        "trunk.num_layers": range(1, 9),
        "experts.active_experts": (None,),
    },
    "transfer": {
        "schedule.autoregressive_levels": (1,),
        "schedule.parallel_levels": range(1, 8),
        "tail_layers": range(1, 1000),
        "experts.num_experts": (1,),
        "experts.combine": ("sum",),
        "trunk.kind": ("feedback",),
        "trunk.num_layers": (0,),
        "trunk.input": ("wide",),
        "trunk.residual": ("feature",),
        "trunk.input_norms": (False,),
        "trunk.fusion_layers": (None,),
        "trunk.tokens": ("single",),
        "trunk.mlp_width": (None,),
        "trunk.ttt_steps": (1,),
    },
}


_REQUIRED_BY_BLOCK: dict[str, Container[object]] = {
    "schedule.heads": ("masks",),
    "schedule.autoregressive_levels": (1,),
    "trunk.ttt_steps": (1,),
    "trunk.mlp_width": (None,),
    "trunk.input": ("join",),
}


class ScheduleSettings(Settings):
    """Depth of the draft tree."""

    autoregressive_levels: int = Field(4, ge=1, le=16)
    """Number of levels that need one pass of the trunk each; in training, also the greatest
    distance from a position to its anchor, the last verified position before it."""
    parallel_levels: int = Field(0, ge=0, le=15)
    """Number of further levels, all predicted by the last pass of the trunk."""
    parallel_heads: ParallelHeads = "experts"
    """Networks that predict the parallel levels. experts: the experts, with separate output
    matrices. branch: one network per level, as wide as an expert, which reads the last two tokens
    of a path with their features, as in Gumiho. branch requires a trunk that reads features, and an
    experts.output_norm other than feedback. masks: trunk and experts themselves, which read one
    trained mask per level in place of the token that is not drafted yet, as in ParallelSpec. masks
    requires trunk.tokens single, a trunk.num_layers of at least 1, and experts.active_experts
    null. transfer: one matrix per level instead of trunk and experts, and then tail_layers of the
    target, as in Hidden Transfer; the matrices read the input of these layers at the last verified
    token. transfer requires the other settings of `configs/drafters/hidden-transfer.yaml`, except
    for parallel_levels and tail_layers; there is one pass, because the states after these layers
    are not those that the matrices read."""

    path: Literal["none", "embedding", "recurrent", "tables"] = "none"
    """What a parallel level knows of the token before it on the path. none: nothing; embedding: a
    matrix for each level adds what the embedding of that token says to the level's feature;
    recurrent: another matrix reads the feature from which that token was drafted, so that each
    level knows its whole path, and the experts read the sum, which requires parallel_heads masks;
    tables: two tables of path_rank numbers per token give the logits
    of all levels, in drafters that were imported (DSpark)."""
    path_rank: int | None = Field(None, ge=1)
    """Number of numbers per token in the tables of path."""

    @property
    def heads(self) -> ParallelHeads | None:
        """The networks that predict the parallel levels; None if there are no such levels."""
        return self.parallel_heads if self.parallel_levels else None

    @model_validator(mode="after")
    def _path_leads_somewhere(self) -> "ScheduleSettings":
        if self.path == "embedding" and self.heads in (None, "transfer"):
            raise ValueError(
                "path embedding requires parallel_levels, and other parallel_heads than transfer"
            )
        if self.path == "recurrent" and self.heads != "masks":
            raise ValueError("path recurrent requires parallel_levels, and parallel_heads masks")
        if (self.path_rank is None) is (self.path == "tables"):
            raise ValueError("path tables requires path_rank, and other paths have none")
        return self

    @property
    def depth(self) -> int:
        """The length of the longest path of a draft tree, in tokens."""
        return self.autoregressive_levels + self.parallel_levels


def _words(allowed: Container[object]) -> str:
    if isinstance(allowed, range):
        return f"of at least {allowed.start}"
    assert isinstance(allowed, tuple)
    return " or ".join("null" if value is None else str(value).lower() for value in allowed)


class DrafterSettings(Settings):
    """Settings that determine a drafter's parameters and the depth of its draft trees."""

    trunk: TrunkSettings = TrunkSettings()
    """The attention part of the drafter."""
    memory: MemorySettings = MemorySettings()
    """The memory that the trunk attends to; unused if trunk.kind is feedback."""
    experts: ExpertsSettings = ExpertsSettings()
    """The mixture of experts after the trunk."""
    schedule: ScheduleSettings = ScheduleSettings()
    """The depth of the draft tree."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon of all norms of the drafter. Published drafters for Llama 3 have 1e-5."""
    tail_layers: int = Field(0, ge=0)
    """Target layer inference (arXiv 2410.03804): number of the target's last layers that run after
    the experts. The experts then predict the input of the first of these layers. Requires
    experts.combine sum and, unless schedule.parallel_heads is transfer, schedule.parallel_levels
    0."""
    draft_vocab_size: int | Literal["auto"] | None = "auto"
    """Number of distinct tokens that may be drafted, the most frequent ones in the responses of the
    training data, and at most as many as these responses contain. auto: the smallest of 8192, 16384
    and 32768 that covers at least 97% of the response tokens, or 32768 if none of them does; for a
    target whose vocabulary is not larger than the chosen number, all tokens. null: all tokens."""

    @field_validator("draft_vocab_size")
    @classmethod
    def _some_token_is_drafted(cls, size: int | str | None) -> int | str | None:
        if isinstance(size, int) and size < 1:
            raise ValueError("a number of at least 1, auto, or null")
        return size

    @model_validator(mode="after")
    def _levels_have_inputs(self) -> "DrafterSettings":
        heads = self.schedule.parallel_heads
        self._check(f"schedule.parallel_heads={heads}", _REQUIRED[heads])
        if self.trunk.is_block:
            self._check("trunk.kind=block", _REQUIRED_BY_BLOCK)
        elif self.memory.mixture != "none":
            raise ValueError("memory.mixture=per_layer requires trunk.kind block")
        return self

    def _check(self, setting: str, required: dict[str, Container[object]]) -> None:
        """Raise an error unless the other settings have the values that a setting requires."""
        for name, allowed in required.items():
            if reduce(getattr, name.split("."), self) not in allowed:
                raise ValueError(f"{setting} requires {name} " + _words(allowed))

    @model_validator(mode="after")
    def _tail_follows_one_feature(self) -> "DrafterSettings":
        fits = self.experts.combine == "sum"
        fits = fits and self.schedule.heads in (None, "transfer")
        if self.tail_layers and not fits:
            raise ValueError(
                "tail_layers requires experts.combine=sum, and schedule.parallel_levels=0 or "
                "schedule.parallel_heads=transfer"
            )
        own = self.experts.head == "own" or self.experts.output_norm != "none"
        if self.tail_layers and own:
            raise ValueError(
                "tail_layers requires experts.head=target and experts.output_norm=none"
            )
        return self


AUTO_DRAFT_VOCAB_SIZES = (8_192, 16_384, 32_768)
"""Sizes that `draft_vocab_size: auto` selects from, in ascending order."""


def largest_draft_vocab_size(settings: DrafterSettings, vocab_size: int) -> int | None:
    """Return the largest draft vocabulary that the settings allow; None if it has all tokens.

    Only training data determines the size that `auto` stands for.
    """
    if settings.draft_vocab_size != "auto":
        return settings.draft_vocab_size
    return AUTO_DRAFT_VOCAB_SIZES[-1] if vocab_size > AUTO_DRAFT_VOCAB_SIZES[-1] else None
