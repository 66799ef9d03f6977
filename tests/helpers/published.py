"""Tiny published drafters of several families: their files, and independent forward passes.

The forward passes follow the descriptions of the published architectures, one token after the
other and without any code of this project.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import PreTrainedModel

HIDDEN, INNER, HEADS, KV_HEADS, DIM, WIDE_DIM = 32, 24, 4, 2, 8, 12
Weights = dict[str, Tensor]


def eagle_config(vocab: int = 61, **changes: Any) -> dict[str, Any]:
    """Return the config of a drafter of EAGLE-1, with changes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-3,
        "vocab_size": vocab,
        **changes,
    }


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> Weights:
    """Return random weights; gains of norms are around 1, and matrices keep the scale of inputs."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_gain = "norm" in name
        weights[name] = 1 + 0.3 * noise if is_gain else noise * (0.8 / shape[-1] ** 0.5)
    return weights


def _attention_shapes(prefix: str, width: int, dim: int = DIM) -> dict[str, tuple[int, ...]]:
    sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    shapes = {f"{prefix}{name}_proj.weight": (n * dim, width) for name, n in sizes.items()}
    return {**shapes, f"{prefix}o_proj.weight": (HIDDEN, HEADS * dim)}


def _mlp_shapes(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, HIDDEN),
        f"{prefix}up_proj.weight": (inner, HIDDEN),
        f"{prefix}down_proj.weight": (HIDDEN, inner),
    }


def eagle_weights(
    bias: bool = True,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    input_norms: bool = False,
    seed: int = 0,
) -> Weights:
    """Return random weights of a drafter of EAGLE-1."""
    shapes = {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        **_attention_shapes("layers.0.self_attn.", HIDDEN),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
        **_mlp_shapes("layers.0.mlp.", INNER),
    }
    if bias:
        shapes["fc.bias"] = (HIDDEN,)
    if qkv_bias:
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"layers.0.self_attn.{name}_proj.bias"] = (heads * DIM,)
    if qk_norm:
        shapes |= {f"layers.0.self_attn.{name}_norm.weight": (DIM,) for name in "qk"}
    if input_norms:
        parts = ("embedding", "hidden_states")
        shapes |= {f"{part}_layernorm.weight": (HIDDEN,) for part in parts}
    return _random(shapes, seed)


def jakiro_weights(seed: int = 0) -> Weights:
    """Return random weights of a drafter of the published Jakiro."""
    weights = {name: part for name, part in eagle_weights().items() if ".mlp." not in name}
    shapes = {"layers.0.mlp_moe.gate.weight": (4, HIDDEN)}
    for expert in range(2):
        shapes |= _mlp_shapes(f"layers.0.mlp_moe.experts.{expert}.", HIDDEN)
    return weights | _random(shapes, seed)


def eagle3_weights(
    num_drafted: int = 23,
    vocab: int = 61,
    fused: str = "none",
    qk_norm: bool = False,
    seed: int = 0,
) -> Weights:
    """Return random weights of a drafter of EAGLE-3, whose heads are wider than its hidden size.

    Args:
        fused: norm of the fused states: none, each (EAGLE-3.1) or all.
    """
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        **_attention_shapes("midlayer.self_attn.", 2 * HIDDEN, WIDE_DIM),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        **_mlp_shapes("midlayer.mlp.", INNER),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (num_drafted, HIDDEN),
    }
    if fused == "each":
        shapes |= {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}
    elif fused == "all":
        shapes["input_norm.weight"] = (3 * HIDDEN,)
    if qk_norm:
        shapes |= {f"midlayer.self_attn.{name}_norm.weight": (WIDE_DIM,) for name in "qk"}
    weights = _random(shapes, seed)
    if num_drafted < vocab:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randperm(vocab, generator=generator)[:num_drafted].sort().values
        is_drafted = torch.zeros(vocab, dtype=torch.bool)
        is_drafted[ids] = True
        weights |= {"d2t": ids - torch.arange(num_drafted), "t2d": is_drafted}
    return weights


def eagle3_config(vocab: int = 61, num_drafted: int = 23, **changes: Any) -> dict[str, Any]:
    """Return the config of a drafter of EAGLE-3 in the layout of EAGLE, with changes."""
    own = {"head_dim": WIDE_DIM, "draft_vocab_size": num_drafted}
    return eagle_config(vocab, architectures=["LlamaForCausalLMEagle3"], **(own | changes))


def as_speculators(
    weights: Weights, config: dict[str, Any], **changes: Any
) -> tuple[Weights, dict[str, Any]]:
    """Return the weights and the config of a drafter of EAGLE-3 in the layout of speculators."""
    renamed = {name.replace("midlayer.", "layers.0."): part for name, part in weights.items()}
    own = {"speculators_model_type": "eagle3", "draft_vocab_size": config["draft_vocab_size"]}
    ids = {key: value for key, value in config.items() if key.endswith("layer_ids")}
    return renamed, own | ids | {"transformer_layer_config": config} | changes


def save_published(
    folder: Path, weights: Weights, config: dict[str, Any], layout: str = "safetensors"
) -> Path:
    """Write a published drafter, and return its folder.

    Args:
        layout: safetensors, bin, prefixed (names begin with `model.`) or sharded (two files).
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if layout == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    elif layout == "sharded":
        names = sorted(weights)
        files = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
        for file in set(files.values()):
            save_file({n: weights[n] for n in names if files[n] == file}, folder / file)
        index = json.dumps({"weight_map": files})
        (folder / "model.safetensors.index.json").write_text(index)
    else:
        prefix = "model." if layout == "prefixed" else ""
        save_file(
            {prefix + name: part.contiguous().clone() for name, part in weights.items()},
            folder / "model.safetensors",
        )
    return folder


# --- Forward passes ------------------------------------------------------------------------------


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def _rotated(heads: Tensor, frequencies: Tensor, scale: float = 1.0) -> Tensor:
    """Rotate [tokens, heads, dim] by the index of each token; pairs are half a head apart."""
    angle = torch.arange(len(heads))[:, None, None] * frequencies
    first, second = heads.chunk(2, -1)
    cos, sin = (scale * part.to(heads.dtype) for part in (angle.cos(), angle.sin()))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def frequencies_of(theta: float, dim: int = DIM) -> Tensor:
    """Return the angles per token of a rotary embedding."""
    return theta ** (-torch.arange(0, dim, 2) / dim)


def _attended(
    x: Tensor,
    weights: Weights,
    prefix: str,
    frequencies: Tensor,
    eps: float,
    scale: float = 1.0,
) -> Tensor:
    """Return the output of causal attention for all tokens, before the residual addition."""

    def projected(name: str) -> Tensor:
        bias = weights.get(f"{prefix}{name}_proj.bias", torch.zeros(()))
        heads = x @ weights[f"{prefix}{name}_proj.weight"].T + bias
        heads = heads.view(len(x), -1, 2 * len(frequencies))
        gain = weights.get(f"{prefix}{name}_norm.weight")
        return heads if gain is None else _norm(heads, gain, eps)

    query, key = (_rotated(projected(name), frequencies, scale) for name in "qk")
    value = projected("v")
    group = query.shape[1] // key.shape[1]
    mixed = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // group].T / query.shape[2] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        mixed.append(scores.softmax(-1) @ value[:, head // group])
    output = torch.cat(mixed, -1) @ weights[f"{prefix}o_proj.weight"].T
    return output + weights.get(f"{prefix}o_proj.bias", torch.zeros(()))


def _mlp(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    gate, up, down = (weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


class PublishedDrafter:
    """The forward pass of EAGLE-1, and of the published Jakiro if the weights have experts."""

    def __init__(
        self, weights: Weights, target: PreTrainedModel, eps: float = 1e-3, theta: float = 10_000.0
    ) -> None:
        self.weights = {
            name: part.to(target.dtype) if part.is_floating_point() else part
            for name, part in weights.items()
        }
        self.target, self.eps = target, eps
        self.scale = 1.0  # of rotated queries and keys
        self.frequencies = frequencies_of(theta)

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], path: Sequence[int]) -> Tensor:
        """Return the logits after the root and after each further token of a drafted path.

        For a Jakiro, the last row is the second level of the last pass.

        Args:
            path: the root, which the target has chosen after the prompt, and drafted tokens.
        """
        states = self.target(torch.tensor([list(prompt)]), output_hidden_states=True)
        features = self.read(states.hidden_states)
        tokens, outputs = [*prompt[1:], path[0]], []
        for token in [*path[1:], None]:
            levels = [level[-1] for level in self.levels(self.embedded(tokens), features)]
            outputs.append(levels[0])
            features = torch.cat((features, self.fed_back(levels[0])[None]))
            tokens.append(token)
        return torch.stack([self.head(output) for output in (*outputs, *levels[1:])])

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """Return the target's embeddings."""
        return self.target.get_input_embeddings()(torch.tensor(tokens))

    def read(self, states: tuple[Tensor, ...]) -> Tensor:
        """Return the features of the verified tokens from the target's hidden states."""
        return states[-1][0]

    def fed_back(self, output: Tensor) -> Tensor:
        """Return the feature that the next pass reads."""
        return output

    def head(self, output: Tensor) -> Tensor:
        """Return the logits of all tokens."""
        return self.target.lm_head(output)

    def levels(self, embedded: Tensor, features: Tensor) -> list[Tensor]:
        """Return the outputs of each level for all tokens."""
        w, layer = self.weights, "layers.0."
        if "embedding_layernorm.weight" in w:
            embedded = _norm(embedded, w["embedding_layernorm.weight"], self.eps)
            features = _norm(features, w["hidden_states_layernorm.weight"], self.eps)
        x = torch.cat((embedded, features), -1) @ w["fc.weight"].T
        x = x + w.get("fc.bias", torch.zeros(()))
        x = x + _attended(x, w, f"{layer}self_attn.", self.frequencies, self.eps)
        normed = _norm(x, w[f"{layer}post_attention_layernorm.weight"], self.eps)
        if f"{layer}mlp_moe.gate.weight" not in w:
            return [x + _mlp(normed, w, f"{layer}mlp.")]
        experts = [_mlp(normed, w, f"{layer}mlp_moe.experts.{e}.") for e in range(2)]
        scores = normed @ w[f"{layer}mlp_moe.gate.weight"].T
        own, later = scores[:, :2].softmax(-1), scores[:, 2:].softmax(-1)
        first = own[:, :1] * experts[0] + own[:, 1:] * experts[1]
        difference = later[:, :1] * experts[0] - later[:, 1:] * experts[1]
        is_first_best = later[:, :1] >= later[:, 1:]
        return [x + first, x + torch.where(is_first_best, difference, -difference)]


class PublishedEagle3(PublishedDrafter):
    """The forward pass of EAGLE-3 and EAGLE-3.1."""

    def __init__(
        self,
        weights: Weights,
        target: PreTrainedModel,
        layers: Sequence[int],
        residual_is_normed: bool = False,
        feeds_normed_back: bool = False,
        eps: float = 1e-3,
        theta: float = 10_000.0,
    ) -> None:
        super().__init__(weights, target, eps)
        self.layers, self.residual_is_normed = layers, residual_is_normed
        self.feeds_normed_back = feeds_normed_back
        self.frequencies = frequencies_of(theta, WIDE_DIM)

    def read(self, states: tuple[Tensor, ...]) -> Tensor:
        """Return the fused states of the verified tokens."""
        w = self.weights
        parts = [states[layer][0] for layer in self.layers]
        if "fc_norm.0.weight" in w:
            gains = [w[f"fc_norm.{index}.weight"] for index in range(3)]
            parts = [_norm(part, gain, self.eps) for part, gain in zip(parts, gains, strict=True)]
        joined = torch.cat(parts, -1)
        if "input_norm.weight" in w:
            joined = _norm(joined, w["input_norm.weight"], self.eps)
        return joined @ w["fc.weight"].T

    def fed_back(self, output: Tensor) -> Tensor:
        """Return the output before or after the final norm."""
        if not self.feeds_normed_back:
            return output
        return _norm(output, self.weights["norm.weight"], self.eps)

    def head(self, output: Tensor) -> Tensor:
        """Return the logits of all tokens, which are -inf for those that are not drafted."""
        w = self.weights
        own = _norm(output, w["norm.weight"], self.eps) @ w["lm_head.weight"].T
        if "d2t" not in w:
            return own
        logits = own.new_full((*own.shape[:-1], self.target.config.vocab_size), float("-inf"))
        return logits.index_copy(-1, torch.arange(len(w["d2t"])) + w["d2t"], own)

    def levels(self, embedded: Tensor, features: Tensor) -> list[Tensor]:
        """Return the outputs before the final norm for all tokens."""
        w = self.weights
        normed = _norm(features, w["midlayer.hidden_norm.weight"], self.eps)
        embedded = _norm(embedded, w["midlayer.input_layernorm.weight"], self.eps)
        both = torch.cat((embedded, normed), -1)
        x = normed if self.residual_is_normed else features
        x = x + _attended(both, w, "midlayer.self_attn.", self.frequencies, self.eps, self.scale)
        x_normed = _norm(x, w["midlayer.post_attention_layernorm.weight"], self.eps)
        return [x + _mlp(x_normed, w, "midlayer.mlp.")]


def greedy_texts(target: PreTrainedModel, prompts: Tensor, length: int = 24) -> Tensor:
    """Return prompts of the same length, continued greedily by the target."""
    options = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "pad_token_id": 0}
    texts: Tensor = target.generate(prompts, max_new_tokens=length, **options)
    return texts


def fitted(drafter: PublishedDrafter, texts: Tensor, steps: int = 40) -> Weights:
    """Return weights that are fitted to texts by a few optimizer steps."""
    with torch.no_grad():
        states = drafter.target(texts, output_hidden_states=True).hidden_states
    weights = {name: part.clone() for name, part in drafter.weights.items()}
    learned = [part.requires_grad_() for part in weights.values() if part.is_floating_point()]
    drafter.weights = weights
    optimizer = torch.optim.Adam(learned, lr=1e-2)
    for _ in range(steps):
        total = torch.zeros(())
        for row, text in enumerate(texts):
            features = drafter.read(tuple(state[row : row + 1, :-2] for state in states))
            output = drafter.levels(drafter.embedded(text[1:-1].tolist()), features)[0]
            scores = drafter.head(output).log_softmax(-1).gather(1, text[2:, None])
            total = total - scores[scores.isfinite()].mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    drafter.weights = {name: part.detach() for name, part in weights.items()}
    return drafter.weights
