"""How fast this machine is: seconds of steps that are taken, and of large matrix products."""

from typing import Any

import torch

from inference.bench.timing import medians
from inference.decoder import SpeculativeDecoder
from training.batch import Batch
from training.config import anchor_rule
from training.data.sampler import Sampler
from training.input_settings import TORCH_DTYPES
from training.module import TrainingModule
from training.optimizer import build_optimizer
from training.preparation import Prepared
from training.target_reader import TargetReader

_REPEATS = 3  # of what is timed, after one time that is not
_TOKENS = 32  # decoded to know the rate
_PRODUCT = {"cpu": 1024, "cuda": 8192}  # rows and columns of a large matrix


def decoding_rate(inputs: Prepared) -> float:
    """Return tokens per second of decoding without a drafter, after the prompt is read."""
    row = inputs.rows.row(0).token_ids.tolist()
    prompt = row[: max(1, len(row) // 2)]
    count = min(_TOKENS, inputs.target.spec.max_position - len(prompt))
    decoder = SpeculativeDecoder(inputs.target.model, tokenizer=inputs.tokenizer)
    # With a smallest number, for one token that ends the text has no rate.
    fixed: dict[str, Any] = {"min_new_tokens": count, "max_new_tokens": count}
    fixed |= {"temperature": 0.0, "seed": 0}
    decoder.generate(prompt, **fixed)  # the first time is slower
    return decoder.generate(prompt, **fixed).stats.tokens_per_second


def seconds_per_step(inputs: Prepared, device: torch.device) -> float:
    """Return the seconds of an optimizer step: its micro-batches, and the update.

    Raises:
        ConfigError: the rows of a step cannot be shared out evenly.
    """
    settings = inputs.settings
    accumulation = settings.batch.accumulation(1)
    dtype = TORCH_DTYPES[settings.engine.dtype]
    with torch.random.fork_rng(devices=[]):
        drafter = inputs.build_drafter()
    recompute = settings.engine.activation_checkpointing
    module = TrainingModule(drafter, settings.objective, recompute).to(device, dtype)
    reader = TargetReader(inputs.target, drafter, settings.data.row_length, dtype)
    optimizer = build_optimizer(module, settings.optimizer)
    batch = sample_batch(inputs).to(device)

    def micro_batch() -> None:
        module.zero_grad()  # here, so that there always are gradients to update with
        module(reader.view(batch), batch, reader).total.backward()

    seconds = medians({"micro-batch": micro_batch, "update": optimizer.step}, _REPEATS)
    return accumulation * seconds["micro-batch"] + seconds["update"]


def sample_batch(inputs: Prepared) -> Batch:
    """Return the first micro-batch that one process would read."""
    batch = inputs.settings.batch
    sampler = Sampler(
        inputs.rows,
        rows_per_step=batch.rows,
        rule=anchor_rule(inputs.settings),
        seed=inputs.settings.seed,
    )
    return sampler.batch(0, 0, batch.micro_batch)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return floating-point operations per second of a large matrix product, the most there is."""
    size = _PRODUCT[device.type]
    factor = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / medians({"product": lambda: factor @ factor}, _REPEATS)["product"]
