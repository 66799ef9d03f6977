"""A drafter as a model of vLLM: an EAGLE-3 head of its own architecture, which drafts chains.

vLLM's row p has the token x_{p+1} and the target's hidden states at x_p. For a drafter, this is
position p + 1. In each step, vLLM calls `combine_hidden_states` for the verified tokens, then
`forward` and `compute_logits` once per drafted token. The second result of `forward` takes the
place of the combined hidden states of the drafted token:

    [feature | memory                            | 0 ...]   of a verified token
    [feature | memory of the last verified token | n ...]   of the n-th drafted token after it

The number n, the token's *age*, may be repeated, because vLLM wants a width that is a multiple of
the number of heads.
"""

from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.utils import maybe_prefix, process_eagle_weight

from inference.vllm_plugin.attention import CachedAttend, VerifiedAttend
from inference.vllm_plugin.checks import (
    check_config,
    check_draft_ids,
    check_states,
    wrong_weights,
)
from jakiro.config import (
    JakiroConfig,
    encoder_arguments,
    experts_arguments,
    last_hidden_state,
    state_sources,
    trunk_arguments,
)
from jakiro.experts import MixtureOfExperts, joint_log_probs
from moa.attention import KV
from moa.layers import Rotary
from moa.memory import MemoryEncoder
from moa.target_kv import TargetKV
from moa.trunk import Trunk, TrunkInputs


class DraftNetwork(nn.Module):
    """The modules of a drafter, under the names of its checkpoint, and the target's embeddings."""

    def __init__(
        self, config: JakiroConfig, facts: dict[str, Any], vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        settings, record = config.settings, config.target_record
        self.hidden = record.hidden_size
        self.num_ages = facts["num_ages"]
        self.last_state = last_hidden_state(record)
        self.memory_source, self.feature_source = state_sources(settings, record)
        self.is_rotated = settings.memory.rotated
        memory, features = encoder_arguments(config)
        self.memory_encoder = None if memory is None else MemoryEncoder(**memory)
        self.feature_encoder = None if features is None else MemoryEncoder(**features)
        self.trunk = Trunk(**trunk_arguments(config))
        self.experts = MixtureOfExperts(**experts_arguments(config))
        self.embed_tokens = VocabParallelEmbedding(
            record.vocab_size, self.hidden, prefix=maybe_prefix(prefix, "embed_tokens")
        )
        self.target_norm: nn.Module | None = None
        if facts["norm_eps"] is not None:
            self.target_norm = nn.RMSNorm(self.hidden, eps=facts["norm_eps"])
        self.target_kv = None if facts["kv"] is None else _target_kv(self.hidden, facts["kv"])
        self.head_norm: nn.Module | None = None
        if settings.experts.output_norm == "head":
            self.head_norm = nn.RMSNorm(self.hidden, eps=settings.norm_eps)
        self._use_cache(vllm_config, prefix)

    def encode(self, states: dict[int, Tensor]) -> Tensor:
        """Return [feature | memory | ages] of verified tokens.

        Memory from keys and values is returned before the keys are rotated and encoded, because
        positions are not known here. Memory from keys that are not rotated needs no positions.

        Args:
            states: hidden states [tokens, hidden] by index.
        """
        parts = []
        if self.feature_encoder is not None and self.feature_source is not None:
            read = self._read(states, self.feature_source.layers)
            parts.append(self.feature_encoder(read[None])[0])
        if self.memory_encoder is not None and self.memory_source is not None:
            layers = self.memory_source.layers
            if self.target_kv is None:
                parts.append(self.memory_encoder(self._read(states, layers)[None])[0])
            else:
                inputs = torch.stack([states[layer] for layer in layers], dim=1)
                raw = self.target_kv(inputs)
                parts.append(
                    raw.flatten(1) if self.is_rotated else self.memory_encoder(raw[None])[0]
                )
        parts.append(parts[0].new_zeros(len(parts[0]), self.num_ages))
        return torch.cat(parts, dim=-1)

    def forward(
        self, embeddings: Tensor, rows: Tensor, given: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return features and log-weights of the components, and the input of the next step.

        Args:
            embeddings: token embeddings [tokens, hidden].
            rows: positions of the tokens whose hidden states `given` has [tokens].
            given: output of `encode`, or of this method in the step before.
        """
        verified = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=given.device)
        previous: Tensor | None = None
        memory: tuple[KV, ...] = ()
        if self.feature_encoder is not None:
            previous = given[None, :, : self.hidden]
        if self.memory_encoder is not None and self.trunk.cross_attention is not None:
            ages = given[:, -1].long()
            verified = (ages == 0)[None, None, None]
            memory = (self._memory(given, rows - ages),)
        vectors = self.trunk(
            embeddings[None], rows[None] + 1, verified, TrunkInputs(previous, memory, verified)
        )
        output = self.experts(vectors)
        following = given.clone()
        following[:, given.shape[-1] - self.num_ages :] += 1
        if previous is not None:
            following[:, : self.hidden] = output.mean_feature[0]
        return output.features[0, :, 0], output.log_weights[0], following

    def _memory(self, given: Tensor, rows: Tensor) -> KV:
        """Return keys and values of the memory that `given` contains, at its own positions."""
        assert self.memory_encoder is not None
        assert self.trunk.cross_attention is not None
        start = self.hidden if self.feature_encoder is not None else 0
        memory = given[:, start : -self.num_ages]
        if self.target_kv is not None and self.is_rotated:
            per_layer = memory.unflatten(-1, (len(self.target_kv.norm), -1))
            memory = self.memory_encoder(self.target_kv.rotated(per_layer, rows)[None])[0]
        return self.trunk.cross_attention.kv(memory[None], rows[None])

    def _read(self, states: dict[int, Tensor], layers: tuple[int, ...]) -> Tensor:
        """Return hidden states side by side; the last one is that after the target's final norm."""
        read = [states[layer] for layer in layers]
        if self.target_norm is not None:
            read = [
                self.target_norm(state) if layer == self.last_state else state
                for layer, state in zip(layers, read, strict=True)
            ]
        return torch.stack(read, dim=1)

    def _use_cache(self, vllm_config: VllmConfig, prefix: str) -> None:
        """Let the trunk attend to vLLM's cache."""
        itself, cross = self.trunk.self_attention, self.trunk.cross_attention
        assert itself is not None, "the export checks it"
        first = vllm_config.model_config.get_total_num_hidden_layers()
        # If all layers of the target have a window, this config has it, too; a drafter has none.
        cache = copy(vllm_config.cache_config)
        cache.sliding_window = None

        def cached(index: int) -> CachedAttend:
            attention = Attention(
                itself.num_heads,
                itself.head_dim,
                itself.head_dim**-0.5,
                num_kv_heads=itself.num_kv_heads,
                cache_config=cache,
                prefix=maybe_prefix(prefix, f"layers.{first + index}.attn"),
            )
            return CachedAttend(attention, itself.head_dim)

        itself.attend = cached(0)
        if cross is not None:
            cross.attend = VerifiedAttend(cached(1), cached(2))


def _target_kv(hidden: int, facts: dict[str, Any]) -> TargetKV:
    rotary = Rotary(facts["head_dim"], 1.0, tuple(facts["frequencies"]), facts["scale"])
    return TargetKV(facts["num_layers"], hidden, facts["width"], facts["norm_eps"], rotary)


class VllmDrafter(Eagle3LlamaForCausalLM):  # type: ignore[misc]  # vLLM accepts subclasses only
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        exported = self.config.jakiro
        config = JakiroConfig(drafter=exported["drafter"], target=exported["target"])
        check_config(config, vllm_config)
        self.model = DraftNetwork(
            config, exported["facts"], vllm_config, maybe_prefix(prefix, "model")
        )
        num_drafted = self.config.draft_vocab_size
        is_restricted = config.draft_vocab_size is not None
        # vLLM replaces None by the target's head.
        self.lm_head: nn.Module | None = None
        if is_restricted or config.settings.experts.head == "own":
            self.lm_head = ParallelLMHead(
                num_drafted, self.model.hidden, prefix=maybe_prefix(prefix, "lm_head")
            )
        self.logits_processor = LogitsProcessor(num_drafted)
        ids = torch.zeros(num_drafted, dtype=torch.long)
        self.draft_ids = nn.Parameter(ids, requires_grad=False) if is_restricted else None

    def embed_input_ids(
        self, input_ids: Tensor, multimodal_embeddings: Any = None, is_multimodal: Any = None
    ) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Return the input of `forward` for verified tokens.

        Args:
            hidden_states: the hidden states in ascending order, side by side.
        """
        layers = self.config.eagle_aux_hidden_state_layer_ids
        check_states(layers, hidden_states.shape[-1], self.model.hidden)
        states = hidden_states.chunk(len(layers), dim=-1)
        return self.model.encode(dict(zip(layers, states, strict=True)))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden_states: Tensor,
        inputs_embeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the input of `compute_logits`, and `hidden_states` of the next drafted token.

        Args:
            positions: positions of the tokens before these.
            hidden_states: output of `combine_hidden_states`, or of the step before.
        """
        embeddings = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        features, log_weights, following = self.model(embeddings, positions, hidden_states)
        return torch.cat((features.flatten(1), log_weights), dim=-1), following

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits of all tokens, minus infinity for those that are never drafted.

        Args:
            hidden_states: features and log-weights of the components, from `forward`.
        """
        hidden = self.model.hidden
        count = hidden_states.shape[-1] // hidden
        features = hidden_states[:, : count * hidden].reshape(-1, hidden)
        if self.model.head_norm is not None:
            features = self.model.head_norm(features)
        logits = self.logits_processor(self.lm_head, features).unflatten(0, (-1, count))
        if count == 1:
            drafted = logits[:, 0]
        else:
            drafted = joint_log_probs(logits, hidden_states[:, count * hidden :]).logsumexp(dim=1)
        if self.draft_ids is None:
            return drafted
        whole = drafted.new_full((len(drafted), self.config.vocab_size), float("-inf"))
        whole[:, self.draft_ids] = drafted
        return whole

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load exported weights and return the names of the parameters that were loaded.

        Embeddings are the target's, and so is the head unless the drafter has one.

        Raises:
            CheckpointError: a weight is missing, the drafter has no parameter of its name, or the
                draft vocabulary is not the one that was exported.
        """
        parameters = {
            full.removeprefix("model."): (full, parameter)
            for full, parameter in self.named_parameters()
        }
        loaded = set()
        for name, weight in weights:
            if name not in parameters:
                raise wrong_weights("no other weights than those of its architecture", name)
            process_eagle_weight(self, name)
            full, parameter = parameters.pop(name)
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)
            loaded.add(full)
        if missing := sorted(parameters.keys() - {"embed_tokens.weight"}):
            raise wrong_weights("all weights of its architecture", f"none named {missing[0]}")
        check_draft_ids(self.draft_ids, self.config.jakiro["facts"].get("draft_ids"))
        return loaded
