"""A Llama with random weights whose most likely token is known: the successor in a cycle.

With ordinary random weights, the largest logits would be nearly equal in half precision, so tokens
would depend on rounding. Here, the layers change the embedding of the last token only slightly, and
the head's row of a token is parallel to the embedding of the token's predecessor in the cycle. The
time of a forward pass is that of any model with the same geometry.
"""

from math import sqrt
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from inference.profiling.gpu.cycle import Cycle
from inference.profiling.gpu.scale import Geometry

LOGIT = 64.0  # logit of the right token, approximately; those of other tokens are much smaller
LAYER_SCALE = 0.01  # factor of the matrices through which layers change the hidden state


@torch.no_grad()
def build_cycle_target(
    geometry: Geometry, cycle: Cycle, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> PreTrainedModel:
    """Return a random Llama that always continues with the successor of the last token.

    Args:
        geometry: geometry of the model.
        cycle: cycle over the model's vocabulary.
        device: device on which the weights are created.
        dtype: dtype of the weights.
        seed: seed of the weights.
    """
    config = LlamaConfig(
        vocab_size=geometry.vocab_size,
        hidden_size=geometry.hidden_size,
        intermediate_size=geometry.intermediate_size,
        num_hidden_layers=geometry.num_layers,
        num_attention_heads=geometry.num_heads,
        num_key_value_heads=geometry.num_kv_heads,
        max_position_embeddings=geometry.max_position,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,  # so that all runs have the same length
    )
    torch.manual_seed(seed)
    with device:
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(LAYER_SCALE)
        layer.mlp.down_proj.weight.mul_(LAYER_SCALE)
    embeddings = model.get_input_embeddings().weight.normal_()
    # The last norm gives the hidden state the length sqrt(hidden_size).
    directions = embeddings / embeddings.norm(dim=1, keepdim=True)
    head = model.get_output_embeddings().weight
    head[cycle.successor] = directions * (LOGIT / sqrt(geometry.hidden_size))
    return model.eval()
