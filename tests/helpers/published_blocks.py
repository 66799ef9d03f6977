"""Tiny published block drafters (DFlash, JetSpec, DSpark), and an independent forward pass."""

from collections.abc import Sequence
from typing import Any

import torch
from helpers.published import HIDDEN, INNER, Weights, frequencies_of
from torch import Tensor
from torch.nn.functional import cross_entropy, silu
from transformers import PreTrainedModel

from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.step import chain_step
from moa.attention import KV
from moa.trunk import TrunkInputs

HEADS, KV_HEADS, DIM, RANK, BLOCK, MASK = 4, 2, 12, 5, 5, 7
TAPS = (1, 2, 4)  # hidden states
EPS, THETA = 1e-3, 500.0


def block_weights(
    num_layers: int = 2,
    has_bias: bool = False,
    rank: int = 0,
    vocab: int = 61,
    drafted: int | None = None,
    seed: int = 0,
) -> Weights:
    """Return random weights.

    Args:
        rank: rank of the tables of DSpark; 0 for DFlash.
        drafted: size of the draft vocabulary; None for no head.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(TAPS) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for index in range(num_layers):
        shapes |= _layer_shapes(f"layers.{index}.", has_bias)
    if drafted is not None:
        shapes["lm_head.weight"] = (drafted, HIDDEN)
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (drafted or vocab, rank)
        shapes["confidence_head.proj.weight"] = (1, HIDDEN + rank)
        shapes["confidence_head.proj.bias"] = (1,)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.3 * noise if "norm" in name else noise * (1.6 / shape[-1] ** 0.5)
    if drafted is not None:
        ids = torch.randperm(vocab, generator=generator)[:drafted]
        is_drafted = torch.zeros(vocab, dtype=torch.bool)
        is_drafted[ids] = True
        weights |= {"d2t": ids - torch.arange(drafted), "t2d": is_drafted}
    return weights


def _layer_shapes(layer: str, has_bias: bool) -> dict[str, tuple[int, ...]]:
    names = ("input_layernorm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = {f"{layer}{name}.weight": (HIDDEN,) for name in names}
    rows = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    sizes = {name: (count, HIDDEN) for name, count in rows.items()} | {"o": (HIDDEN, rows["q"])}
    for name, shape in sizes.items():
        shapes[f"{layer}self_attn.{name}_proj.weight"] = shape
        if has_bias:
            shapes[f"{layer}self_attn.{name}_proj.bias"] = shape[:1]
    shapes |= {f"{layer}self_attn.{name}_norm.weight": (DIM,) for name in "qk"}
    shapes |= {f"{layer}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
    return shapes | {f"{layer}mlp.down_proj.weight": (HIDDEN, INNER)}


def block_config(vocab: int = 61, num_layers: int = 2, **block: Any) -> dict[str, Any]:
    """Return a config in the layout of z-lab, with further keys of `dflash_config`."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": vocab,
        "block_size": BLOCK,
        "dflash_config": {
            "target_layer_ids": [state - 1 for state in TAPS],
            "mask_token_id": MASK,
        }
        | block,
    }


def dspark_config(vocab: int = 61, **changes: Any) -> dict[str, Any]:
    """Return a config of DSpark, whose keys of the block are at the top."""
    config = block_config(vocab)
    own = {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
    }
    return config | config.pop("dflash_config") | own | changes


def as_speculators(config: dict[str, Any], kind: str, **changes: Any) -> dict[str, Any]:
    """Return a config in the layout of speculators."""
    own = {
        "speculators_model_type": kind,
        "aux_hidden_state_layer_ids": list(TAPS),
        "mask_token_id": MASK,
        "block_size": BLOCK,
    }
    layer = {key: value for key, value in config.items() if key != "dflash_config"}
    return own | {"transformer_layer_config": layer} | changes


class PublishedBlock:
    """The forward pass of DFlash, JetSpec and DSpark."""

    def __init__(
        self,
        weights: Weights,
        target: PreTrainedModel,
        is_causal: bool = False,
        reads_anchor: bool = False,
    ) -> None:
        self.weights = {
            name: part.to(target.dtype) if part.is_floating_point() else part
            for name, part in weights.items()
        }
        self.target, self.is_causal, self.reads_anchor = target, is_causal, reads_anchor

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], path: Sequence[int]) -> Tensor:
        """Return the logits below each token of a path, which begins with the root."""
        w = self.weights
        states = self.target(torch.tensor([list(prompt)]), output_hidden_states=True)
        fused = torch.cat([states.hidden_states[tap][0] for tap in TAPS], -1) @ w["fc.weight"].T
        memory = _norm(fused, w["hidden_norm.weight"])
        tokens = torch.tensor([path[0]] + [MASK] * (BLOCK - 1))
        x = self.target.get_input_embeddings()(tokens)
        visible = torch.ones(BLOCK, len(prompt) + BLOCK, dtype=torch.bool)
        if self.is_causal:
            visible = visible.tril(len(prompt))
        layers = len([name for name in w if name.endswith("input_layernorm.weight")])
        for index in range(layers):
            x = self._layer(f"layers.{index}.", x, memory, visible)
        x = _norm(x, w["norm.weight"])[not self.reads_anchor :][: len(path)]
        logits = self.target.lm_head(x) if "d2t" not in w else x @ w["lm_head.weight"].T
        if "markov_head.markov_w1.weight" in w:
            before = w["markov_head.markov_w1.weight"][torch.tensor(path)]
            logits = logits + before @ w["markov_head.markov_w2.weight"].T
        if "d2t" not in w:
            return logits
        ids = torch.arange(logits.shape[1]) + w["d2t"]
        full = logits.new_full((len(logits), self.target.config.vocab_size), float("-inf"))
        return full.index_copy(1, ids, logits)

    def _layer(self, layer: str, x: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        w, count = self.weights, len(memory)
        normed = _norm(x, w[f"{layer}input_layernorm.weight"])
        both = torch.cat((memory, normed))

        def projected(name: str, inputs: Tensor) -> Tensor:
            part = f"{layer}self_attn.{name}_proj."
            return inputs @ w[f"{part}weight"].T + w.get(f"{part}bias", torch.zeros(()))

        query = projected("q", normed).view(len(x), HEADS, DIM)
        key, value = (projected(name, both).view(len(both), KV_HEADS, DIM) for name in "kv")
        query = _rotated(_norm(query, w[f"{layer}self_attn.q_norm.weight"]), count)
        key = _rotated(_norm(key, w[f"{layer}self_attn.k_norm.weight"]), 0)
        mixed = []
        for head in range(HEADS):
            scores = query[:, head] @ key[:, head * KV_HEADS // HEADS].T / DIM**0.5
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            mixed.append(weights @ value[:, head * KV_HEADS // HEADS])
        x = x + projected("o", torch.cat(mixed, -1))
        normed = _norm(x, w[f"{layer}post_attention_layernorm.weight"])
        gate, up, down = (w[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + (silu(normed @ gate.T) * (normed @ up.T)) @ down.T


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * gain


def _rotated(heads: Tensor, start: int) -> Tensor:
    """Rotate [tokens, heads, dim] by positions from `start` on."""
    angle = (start + torch.arange(len(heads)))[:, None, None] * frequencies_of(THETA, DIM)
    first, second = heads.chunk(2, -1)
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def fit_block(
    drafter: JakiroDrafter, target: TargetAdapter, texts: Tensor, steps: int = 60
) -> JakiroDrafter:
    """Fit a block drafter without a path to texts, so that some of its drafts are accepted."""
    count, levels = texts.shape[1], sum(drafter.levels.values())
    with torch.no_grad():
        cache = target.new_cache(len(texts), count, drafter.state_sources.hidden_states)
        target.forward(chain_step(texts, 0), cache)
        slots = torch.arange(count).expand(len(texts), -1)
        state = drafter.state_sources.read(cache, slots)
    roots = slots[:, 1 : count - levels]
    own = torch.eye(roots.shape[1], dtype=torch.bool).expand(len(texts), 1, -1, -1)
    earlier = (slots[:, None, None] < roots[:, None, :, None]).clone()
    wanted = texts.unfold(1, levels, 1)[:, 2:]
    head = drafter.draft_head(target)
    optimizer = torch.optim.Adam(drafter.parameters(), 3e-3)
    for _ in range(steps):
        encoded = drafter.encode_memory(state, slots)
        memory = tuple(map(KV, encoded[::2], encoded[1::2]))
        inputs = TrunkInputs(memory=memory, mask=earlier)
        output = drafter(target.embed(texts)[:, roots[0]], roots, own, inputs)
        logits = head.logits(output.features[:, :, :, 0])
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 2), wanted.flatten()).backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)
