"""Training of the demo's own target: a small Llama, from nothing, in float32."""

import pickle
from io import BytesIO
from pathlib import Path
from time import monotonic

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from jakiro.demo.presets import TargetRecipe
from jakiro.demo.rows import ShuffledRows
from jakiro.errors import CheckpointError
from jakiro.files import write_atomically
from training.muon import Muon

_END_OF_TEXT_ID = 0


class Pretraining:
    """A run that goes on from its checkpoint exactly as if it had never stopped.

    Args:
        recipe: sizes, learning rates, and number of steps.
        token_ids: the training text.
        device: where to train.

    Raises:
        DataError: the text is shorter than one batch.
    """

    def __init__(
        self,
        recipe: TargetRecipe,
        token_ids: Int[Tensor, " stream"],
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.recipe = recipe
        self.model = build_model(recipe).train()
        nn.Module.to(self.model, device)  # the model's own `to` has lost its signature
        self.step = 0
        self.seconds = 0.0  # spent on the steps, also before an interruption
        self._rows = ShuffledRows(
            token_ids,
            row_tokens=recipe.row_tokens,
            rows_per_step=recipe.rows_per_step,
            seed=recipe.seed,
        )
        self._optimizers = _build_optimizers(self.model, recipe)

    @property
    def is_done(self) -> bool:
        """Whether all steps of the recipe are taken."""
        return self.step >= self.recipe.num_steps

    def advance(self) -> float:
        """Take one step and return its loss in nats per token."""
        began = monotonic()
        rows = self._rows.batch(self.step).to(self.model.device)
        loss = next_token_losses(self.model, rows).mean()
        loss.backward()
        share = learning_rate_share(self.recipe, self.step)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * share
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.seconds += monotonic() - began
        return loss.item()

    def save(self, path: Path) -> None:
        """Write weights, optimizer states, and step; a reader sees a whole checkpoint or none."""
        buffer = BytesIO()
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        torch.save(state, buffer)
        write_atomically(path, buffer.getvalue())

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same recipe and text.

        Raises:
            CheckpointError: the checkpoint is damaged; this run is then not usable any more.
        """
        try:
            state = torch.load(path, map_location=self.model.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.seconds = state["step"], state["seconds"]
        except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"cannot resume from {path}", got=error) from error


def build_model(recipe: TargetRecipe) -> LlamaForCausalLM:
    """Return an untrained model that follows from the seed; every block starts as identity."""
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_position,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_END_OF_TEXT_ID,
        pad_token_id=_END_OF_TEXT_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def next_token_losses(
    model: LlamaForCausalLM, rows: Int[Tensor, "rows row_tokens_and_next"]
) -> Float[Tensor, " predictions"]:
    """Return the negative log-likelihood, in nats, of every token of the rows but the first."""
    logits = model(rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def mean_loss(
    model: LlamaForCausalLM, rows: Int[Tensor, "rows row_tokens_and_next"], *, batch_size: int = 8
) -> float:
    """Return the mean negative log-likelihood of the rows, in nats per token."""
    batches = rows.to(model.device).split(batch_size)
    return torch.cat([next_token_losses(model, batch) for batch in batches]).mean().item()


def learning_rate_share(recipe: TargetRecipe, step: int) -> float:
    """Return the share of the peak rates at a step: a rise, a plateau, and a fall towards zero."""
    rise = (step + 1) / recipe.warmup_steps
    fall = (recipe.num_steps - step) / (recipe.decay_share * recipe.num_steps)
    return min(1.0, rise, fall)


def _build_optimizers(
    model: LlamaForCausalLM, recipe: TargetRecipe
) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of the layers, AdamW for the tied embedding and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    muon = Muon(matrices, lr=recipe.muon_lr)
    adamw = torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return muon, adamw
