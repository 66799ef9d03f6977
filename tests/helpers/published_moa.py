"""A tiny published drafter of Mixture of Attentions: its files, and an independent forward pass.

The forward pass follows the description in arXiv 2410.03804, head by head and without any code of
this project.
"""

from collections.abc import Sequence
from typing import Any

import torch
from helpers.published import HIDDEN, Weights, eagle_config, frequencies_of
from torch import Tensor
from torch.nn.functional import silu
from transformers import PreTrainedModel

HEADS, KV_HEADS, DIM = 4, 1, 8  # of both layers over tokens
LAYER_KV_HEADS, LAYER_DIM = 2, 6  # of the layer over the target's layers
WIDTH = 2 * 2 * DIM  # keys and values of the target's two heads


def moa_config(**changes: Any) -> dict[str, Any]:
    """Return the config of a drafter, which is that of its target, with changes."""
    return eagle_config(num_hidden_layers=3, intermediate_size=48, **changes)


def moa_weights(qkv_bias: bool = False, seed: int = 0) -> Weights:
    """Return random weights."""
    shapes = {
        **_layer("self_attention.", HIDDEN, (HEADS, KV_HEADS, DIM), 20),
        **_layer("cross_attention.", HIDDEN, (HEADS, KV_HEADS, DIM), 28),
        **_layer("layer_self_attention.", WIDTH, (HEADS, LAYER_KV_HEADS, LAYER_DIM), 12),
        "Ekv2E.weight": (HIDDEN, WIDTH),
        "Ekv2E.bias": (HIDDEN,),
    }
    if qkv_bias:
        for name, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"self_attention.self_attn.{name}_proj.bias"] = (count * DIM,)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.3 * noise if "norm" in name else noise * (0.8 / shape[-1] ** 0.5)
    return weights


def _layer(
    prefix: str, width: int, heads: tuple[int, int, int], inner: int
) -> dict[str, tuple[int, ...]]:
    num_heads, num_kv_heads, dim = heads
    attention = f"{prefix}self_attn."
    return {
        f"{prefix}input_layernorm.weight": (width,),
        f"{attention}q_proj.weight": (num_heads * dim, width),
        f"{attention}k_proj.weight": (num_kv_heads * dim, width),
        f"{attention}v_proj.weight": (num_kv_heads * dim, width),
        f"{attention}o_proj.weight": (width, num_heads * dim),
        f"{prefix}post_attention_layernorm.weight": (width,),
        f"{prefix}mlp.gate_proj.weight": (inner, width),
        f"{prefix}mlp.up_proj.weight": (inner, width),
        f"{prefix}mlp.down_proj.weight": (width, inner),
    }


class PublishedMoa:
    """The forward pass of a drafter of Mixture of Attentions.

    Args:
        tail_layers: number of the target's last layers that run after the drafter.
    """

    def __init__(
        self,
        weights: Weights,
        target: PreTrainedModel,
        tail_layers: int = 0,
        eps: float = 1e-3,
        theta: float = 10_000.0,
    ) -> None:
        self.weights = {name: part.to(target.dtype) for name, part in weights.items()}
        self.target, self.tail_layers, self.eps, self.theta = target, tail_layers, eps, theta

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], path: Sequence[int]) -> Tensor:
        """Return the logits after the root and after each further token of a drafted path.

        Args:
            path: the root, which the target has chosen after the prompt, and drafted tokens.
        """
        return self.forward(prompt, path)

    def forward(self, prompt: Sequence[int], path: Sequence[int]) -> Tensor:
        """Return the same as `logits`, with gradients."""
        output = self.target(
            torch.tensor([list(prompt)]), output_hidden_states=True, use_cache=True
        )
        memory = self._memory(output.past_key_values)
        tokens = torch.tensor([*prompt, *path])
        embedded = self.target.get_input_embeddings()(tokens)
        causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        positions = torch.arange(len(tokens))
        x = self._decoder_layer("self_attention.", embedded, embedded, positions, causal)
        drafted = x[len(prompt) :]
        known = torch.ones(len(path), len(prompt), dtype=torch.bool)
        places = (positions[len(prompt) :], positions[: len(prompt)])
        states = self._decoder_layer("cross_attention.", drafted, memory, places, known)
        if self.tail_layers:
            before = output.hidden_states[-1 - self.tail_layers][0]
            states = self._tail(torch.cat((before, states)))[len(prompt) :]
        return self.target.lm_head(states)

    def _memory(self, cache: Any) -> Tensor:
        """Return one vector per verified token, from the keys and values of all layers."""
        layers = [torch.cat((layer.keys[0], layer.values[0]), -1) for layer in cache.layers]
        state = torch.stack([part.transpose(0, 1).flatten(1) for part in layers], dim=1)
        index = torch.arange(state.shape[1])
        every = torch.ones(len(index), len(index), dtype=torch.bool)
        mixed = [
            self._decoder_layer("layer_self_attention.", token, token, index, every).mean(0)
            for token in state
        ]
        return torch.stack(mixed) @ self.weights["Ekv2E.weight"].T + self.weights["Ekv2E.bias"]

    def _decoder_layer(
        self,
        prefix: str,
        x: Tensor,
        read: Tensor,
        positions: Tensor | tuple[Tensor, Tensor],
        mask: Tensor,
    ) -> Tensor:
        """Return the output of a decoder layer in which `x` attends to `read`."""
        w = self.weights
        queries_at, keys_at = positions if isinstance(positions, tuple) else (positions, positions)
        gain = w[f"{prefix}input_layernorm.weight"]
        query = self._heads(prefix, "q", _norm(x, gain, self.eps), queries_at)
        key = self._heads(prefix, "k", _norm(read, gain, self.eps), keys_at)
        value = self._heads(prefix, "v", _norm(read, gain, self.eps), None)
        group = query.shape[1] // key.shape[1]
        mixed = []
        for head in range(query.shape[1]):
            scores = query[:, head] @ key[:, head // group].T / query.shape[2] ** 0.5
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            mixed.append(weights @ value[:, head // group])
        x = x + torch.cat(mixed, -1) @ w[f"{prefix}self_attn.o_proj.weight"].T
        normed = _norm(x, w[f"{prefix}post_attention_layernorm.weight"], self.eps)
        gate, up, down = (w[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return x + (silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    def _heads(self, prefix: str, name: str, x: Tensor, positions: Tensor | None) -> Tensor:
        """Return queries, keys or values [tokens, heads, dim], rotated if positions are given."""
        dim = LAYER_DIM if prefix.startswith("layer_") else DIM
        matrix = self.weights[f"{prefix}self_attn.{name}_proj.weight"]
        bias = self.weights.get(f"{prefix}self_attn.{name}_proj.bias", torch.zeros(()))
        heads = (x @ matrix.T + bias).view(len(x), -1, dim)
        if positions is None:
            return heads
        angles = positions[:, None, None] * frequencies_of(self.theta, dim)
        first, second = heads.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _tail(self, states: Tensor) -> Tensor:
        """Return the output of the target's last layers and of its final norm."""
        model = self.target.model
        positions = torch.arange(len(states))[None]
        mask = torch.full((len(states), len(states)), float("-inf"), dtype=states.dtype).triu(1)
        for layer in model.layers[-self.tail_layers :]:
            states = layer(
                states[None],
                attention_mask=mask[None, None],
                position_ids=positions,
                position_embeddings=model.rotary_emb(states[None], positions),
            )[0]
        return model.norm(states)


def fitted(drafter: PublishedMoa, texts: Tensor, steps: int = 200) -> Weights:
    """Return weights that are fitted to texts, as drafts after their first tokens."""
    weights = {name: part.clone().requires_grad_() for name, part in drafter.weights.items()}
    drafter.weights = weights
    optimizer = torch.optim.Adam(weights.values(), lr=1e-2)
    for step in range(steps):
        text, length = texts[step % len(texts)].tolist(), 3 + step % 4
        scores = drafter.forward(text[:length], text[length:-1]).log_softmax(-1)
        loss = -scores.gather(1, torch.tensor(text[length + 1 :])[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.weights = {name: part.detach() for name, part in weights.items()}
    return drafter.weights


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain
