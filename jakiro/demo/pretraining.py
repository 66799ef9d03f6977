"""Training of small Llama models from scratch: the toy target, and models that draft for one."""

import pickle
from io import BytesIO
from pathlib import Path
from time import monotonic

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from rich.progress import Progress
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from jakiro.demo.presets import TargetRecipe
from jakiro.errors import DataError
from jakiro.utils.files import write_atomically
from jakiro.utils.logs import get_logger
from training.loop.muon import Muon

_logger = get_logger(__name__)


class Pretraining:
    """A training run in float32, which resumes from its checkpoint if the checkpoint exists.

    A resumed run ends with the same weights as an uninterrupted run.

    Args:
        recipe: settings of the model and of its training.
        token_ids: training text as one stream of tokens.
        device: device to train on.
        checkpoint: file to save the run to and resume from; None to save no checkpoints.

    Raises:
        DataError: the text is shorter than one batch.
    """

    def __init__(
        self,
        recipe: TargetRecipe,
        token_ids: Int[Tensor, " stream"],
        *,
        device: torch.device | str = "cpu",
        checkpoint: Path | None = None,
    ) -> None:
        self.recipe, self.token_ids, self.checkpoint = recipe, token_ids, checkpoint
        # One sequence fewer than would fit is used, so that the sequences fit at any offset.
        self.num_sequences = (len(token_ids) - 1) // recipe.sequence_length - 1
        if self.num_sequences < recipe.sequences_per_step:
            raise DataError(
                "too few tokens to train on",
                expected=f"at least {(recipe.sequences_per_step + 2) * recipe.sequence_length}",
                got=len(token_ids),
                remedy="use smaller batches, shorter sequences, or more text",
            )
        self._begin(device)
        if checkpoint and checkpoint.exists():
            try:
                self._resume(checkpoint)
            except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
                _logger.warning(
                    "training starts again from step 0, because the checkpoint %s is damaged: %s",
                    checkpoint,
                    error,
                )
                self._begin(device)

    def finish(self, progress: Progress, name: str, *, seconds_between: float = 60.0) -> None:
        """Take all remaining steps, and save the run at intervals if it has a checkpoint file.

        Args:
            progress: progress display.
            name: title of the progress bar.
            seconds_between: seconds between two checkpoints.
        """
        steps = self.recipe.num_steps
        task = progress.add_task(name, total=steps, completed=self.step)
        saved_at = monotonic()
        while self.step < steps:
            loss = self.advance()
            progress.update(task, completed=self.step, description=f"{name} (loss {loss:.2f})")
            if self.checkpoint and monotonic() - saved_at >= seconds_between:
                self._save(self.checkpoint)
                saved_at = monotonic()

    def advance(self) -> float:
        """Take one optimizer step and return its loss in nats per token."""
        began = monotonic()
        loss = _token_losses(self.model, self._batch().to(self.model.device)).mean()
        loss.backward()
        factor = learning_rate_factor(self.recipe, self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.seconds += monotonic() - began
        return loss.item()

    def _begin(self, device: torch.device | str) -> None:
        self.model = build_model(self.recipe).train()
        nn.Module.to(self.model, device)  # type checkers do not know the signature of `model.to`
        self.optimizers = _build_optimizers(self.model, self.recipe)
        self.step = 0
        self.seconds = 0.0  # spent on steps, including those before an interruption

    def _batch(self) -> Int[Tensor, "batch length_and_next"]:
        """Return the sequences of this step; their offset and order differ between epochs."""
        length, batch_size = self.recipe.sequence_length, self.recipe.sequences_per_step
        epoch, index = divmod(self.step, self.num_sequences // batch_size)
        generator = torch.Generator().manual_seed(self.recipe.seed + 1_000_003 * epoch)
        offset = int(torch.randint(length, (), generator=generator))
        order = torch.randperm(self.num_sequences, generator=generator)
        sequences = self.token_ids[offset:].unfold(0, length + 1, length)
        return sequences[order.split(batch_size)[index]]

    def _save(self, path: Path) -> None:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"step": self.step, "seconds": self.seconds, "optimizers": optimizers}
        buffer = BytesIO()
        torch.save(state | {"model": self.model.state_dict()}, buffer)
        write_atomically(path, buffer.getvalue())

    def _resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.model.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]


def build_model(recipe: TargetRecipe) -> LlamaForCausalLM:
    """Return an untrained model, which depends only on the recipe.

    Each layer of this model returns its input unchanged.
    """
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
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


@torch.no_grad()
def mean_loss(
    model: LlamaForCausalLM, token_ids: Int[Tensor, " stream"], recipe: TargetRecipe
) -> float:
    """Return the loss in nats per token on sequences that are spread evenly over held-out text.

    Args:
        model: the trained model.
        token_ids: held-out text as one stream of tokens.
        recipe: recipe of the model, which sets the number of sequences and their length.
    """
    sequences = token_ids.unfold(0, recipe.sequence_length + 1, recipe.sequence_length)
    count = min(recipe.num_validation_sequences, len(sequences))
    indices = torch.linspace(0, len(sequences) - 1, count).long()
    batches = sequences[indices].to(model.device).split(8)
    return torch.cat([_token_losses(model, batch) for batch in batches]).mean().item()


def learning_rate_factor(recipe: TargetRecipe, step: int) -> float:
    """Return the learning rates at a step as a fraction of their peaks.

    The fraction rises linearly, stays at 1, and falls linearly towards zero.

    Args:
        recipe: settings of the training.
        step: index of the optimizer step.
    """
    rise = (step + 1) / recipe.warmup_steps
    fall = (recipe.num_steps - step) / (recipe.decay_share * recipe.num_steps)
    return min(1.0, rise, fall)


def _token_losses(
    model: LlamaForCausalLM, batch: Int[Tensor, "batch length_and_next"]
) -> Float[Tensor, " predictions"]:
    logits = model(batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")


def _build_optimizers(
    model: LlamaForCausalLM, recipe: TargetRecipe
) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the matrices of the layers and AdamW for the tied embedding and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    ids = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in ids]
    muon = Muon(matrices, lr=recipe.muon_lr)
    adamw = torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return muon, adamw
