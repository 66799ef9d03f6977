"""A tiny target, drafters fitted to its texts, and the chains that they draft without vLLM."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from helpers.drafting import chain_frontier, prefilled
from helpers.models import tiny_llama
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from inference.drafters.trained.drafter import TrainedDrafter
from inference.trees.shape import TreeShape
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.experts import joint_log_probs
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target
from jakiro.target.step import chain_step
from moa.attention import KV
from moa.trunk import TrunkInputs

VOCAB, NUM_LAYERS = 256, 5
PROMPT = [1, 5, 9, 77, 130]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "rms_norm_eps": 1e-5,
}


def target_model(vocab: int = VOCAB) -> Any:
    """Return a random Llama whose greedy texts vary, with heads of a size that vLLM supports."""
    return varied(tiny_llama(vocab, **SIZES))


def windowed_model(window: int) -> Any:
    """Return a random Mistral, whose tokens attend to the last `window` tokens only."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
    ends = {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=VOCAB, sliding_window=window, **SIZES, **heads, **ends)
    return varied(MistralForCausalLM(config).eval())


def varied(model: Any) -> Any:
    """Change a random model such that its greedy texts vary, and return it."""
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        for name, part in model.named_parameters():
            if "norm" in name:
                part.uniform_(0.5, 1.5)
    return model


def greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    """Return the new tokens of the target's own greedy text."""
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, max_new_tokens=length, **options)[0, len(prompt) :].tolist()


def fitted_drafter(
    target: TargetAdapter, settings: DrafterSettings, groups: Sequence[Tensor], steps: int
) -> JakiroDrafter:
    """Return a drafter that is fitted to texts, so that some of its drafts are accepted."""
    torch.manual_seed(3)
    drafter = JakiroDrafter(config_for(settings, record_target(target.spec, "tiny")))
    columns = torch.arange(target.spec.vocab_size)
    if drafter.draft_ids is not None:
        counts = torch.cat([texts.flatten() for texts in groups]).bincount(minlength=len(columns))
        drafter.draft_ids.copy_(counts.topk(len(drafter.draft_ids)).indices.sort().values)
        columns.fill_(-1)[drafter.draft_ids] = torch.arange(len(drafter.draft_ids))
    with torch.no_grad():
        for name, part in drafter.named_parameters():
            if "norm" in name:
                part.uniform_(0.8, 1.2)
    optimizer = torch.optim.Adam(drafter.parameters(), 3e-3)
    for _ in range(steps):
        loss = torch.stack([_loss(drafter, target, texts, columns) for texts in groups]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)


def _loss(drafter: JakiroDrafter, target: TargetAdapter, texts: Tensor, columns: Tensor) -> Tensor:
    wanted = columns[texts[:, 2:]]
    scores = _log_probs(drafter, target, texts[:, :-1])
    chosen = scores.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    return -chosen[wanted >= 0].mean()


def _log_probs(drafter: JakiroDrafter, target: TargetAdapter, tokens: Tensor) -> Tensor:
    """Return log-probabilities from position 1 on, given the target states before each position."""
    batch, count = tokens.shape
    with torch.no_grad():
        cache = target.new_cache(batch, count, drafter.state_sources.hidden_states)
        target.forward(chain_step(tokens, 0), cache)
        slots = torch.arange(count).expand(batch, -1)
        state = drafter.state_sources.read(cache, slots)
    encoded = list(drafter.encode_memory(state, slots))
    memory = () if drafter.memory_encoder is None else (KV(encoded.pop(0), encoded.pop(0)),)
    previous = encoded[0][:, 0, :-1] if encoded else None
    causal = torch.ones(count, count, dtype=torch.bool).tril().expand(batch, 1, -1, -1)
    inputs = TrunkInputs(previous, memory, causal[:, :, :-1])
    embeddings = target.embed(tokens[:, 1:])
    output = drafter(embeddings, slots[:, 1:], causal[:, :, 1:, 1:], inputs)
    logits = drafter.draft_head(target).logits(output.features[:, :, 0])
    return joint_log_probs(logits, output.log_weights).logsumexp(dim=2)


@torch.no_grad()
def drafted_chain(
    drafter: JakiroDrafter, target: TargetAdapter, tokens: list[int], length: int
) -> tuple[list[int], Tensor]:
    """Return the greedy chain after `tokens`, and log-probabilities of all tokens at each step."""
    passes = 1 if drafter.config.settings.trunk.is_block else length
    levels = {"autoregressive_levels": passes, "parallel_levels": length - passes}
    shape = TreeShape(**levels, children=1, breadth=1, num_nodes=length)
    session, _ = prefilled(
        TrainedDrafter(drafter, target, shape), torch.tensor([tokens]), len(tokens) - 1
    )
    vocab = target.spec.vocab_size
    ids = torch.arange(vocab) if drafter.draft_ids is None else drafter.draft_ids
    source, frontier = session.start_tree(), None
    drafted, rows = [], torch.full((length, vocab), float("-inf"))
    for step in range(length):
        rows[step, ids] = source.joint(step + 1, frontier)[0, 0].logsumexp(0)
        drafted.append(int(rows[step].argmax()))
        column = int((ids == drafted[-1]).nonzero())
        frontier = chain_frontier(drafted[-1])._replace(columns=torch.tensor([[column]]))
    return drafted, rows


class SimulatedStep(NamedTuple):
    """One decoding step with a chain."""

    chain: list[int]
    log_probs: Tensor
    num_accepted: int


def simulated(
    drafter: JakiroDrafter, target: TargetAdapter, text: list[int], start: int, drafts: int
) -> Iterator[SimulatedStep]:
    """Yield the steps in which greedy decoding with chains writes a text.

    Args:
        text: prompt, the tokens that are generated, and at least `drafts` further ones, which
            determine how many drafts of the last step are accepted.
    """
    known, end = start, len(text) - drafts
    while known + 1 < end:  # the root `text[known]` is not verified yet
        chain, log_probs = drafted_chain(drafter, target, text[: known + 1], drafts)
        follow = text[known + 1 : known + 1 + drafts]
        agree = [drafted == token for drafted, token in zip(chain, follow, strict=True)]
        step = SimulatedStep(chain, log_probs, [*agree, False].index(False))
        yield step
        known += step.num_accepted + 1


def accepted_per_position(steps: Sequence[SimulatedStep], drafts: int) -> list[int]:
    """Return how many drafts at each position of a chain were accepted."""
    return [sum(step.num_accepted > index for step in steps) for index in range(drafts)]
