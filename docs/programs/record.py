"""Tokens and weights of seeded runs, by which two commits are compared on one machine.

Run it in a checkout of each commit, with the same interpreter, and compare the files:

    PYTHONPATH=CHECKOUT python CHECKOUT/docs/programs/record.py FOLDER --out RECORD.json

It trains eight kinds of drafters on a tiny random target, decodes with them and with drafters that
need no training (greedy and sampled, alone and in a batch, fixed trees, float32, one thread), and
asks a server, whose target also verifies trees that this process drafts.
"""

import argparse
import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from inference.decoder import SpeculativeDecoder
from inference.device.decoder import RemoteDecoder

TRAINED = (
    "jakiro",
    "moa",
    "eagle3",
    "parallel-spec",
    "hidden-transfer",
    "chimera",
    "gumiho",
    "jakiro-published",
)
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "seed": 4, "repetition_penalty": 1.2},
)
TEXTS = [inspect.getsource(module)[:20_000] for module in (argparse, json.decoder, inspect)]
PROMPTS = [text[500:620] for text in TEXTS]
SETTINGS = """\
extends: drafters/{name}
target: {{name_or_path: {folder}/target}}
data:
  paths: [{folder}/texts.jsonl]
  cache_folder: {folder}/cache
  sequence_length: 128
  validation_size: 4
drafter: {{draft_vocab_size: null}}
initialize: {{fit_tokens: 2048}}
evaluation: {{every: null, num_prompts: 1, prompt_tokens: 8, max_new_tokens: 8}}
batch: {{global_batch_size: 4, micro_batch_size: 2}}
steps: 4
run_folder: {folder}/runs/{name}
"""


def write_inputs(folder: Path) -> None:
    """Write a target of 12 layers, a smaller model with the same tokenizer, and texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=CHAT)
    for seed, (name, num_layers) in enumerate((("target", 12), ("small", 1))):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(fast),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    pieces = [text[i : i + 1500] for text in TEXTS for i in range(0, len(text), 1500)]
    lines = (json.dumps({"text": piece}) + "\n" for piece in pieces)
    (folder / "texts.jsonl").write_text("".join(lines))


def train(folder: Path, name: str) -> str:
    """Train a drafter, and return a hash of its weights."""
    config = folder / f"{name}.yaml"
    config.write_text(SETTINGS.format(name=name, folder=folder))
    weights = folder / "runs" / name / "drafter" / "model.safetensors"
    if not weights.exists():
        command = [sys.executable, "-m", "jakiro", "train", "--config", str(config)]
        subprocess.run(command, check=True)
    digest = hashlib.sha256()
    for key, value in sorted(load_file(weights).items()):
        digest.update(key.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def decode(folder: Path, drafter: str) -> Iterator[tuple[str, Any]]:
    """Yield new tokens and tau of all prompts, alone and in a batch."""
    decoder = SpeculativeDecoder.from_pretrained(
        drafter, folder / "target", "fixed", dtype="float32", threads=1
    )
    for sampling in SAMPLING:
        outputs = [decoder.generate(each, max_new_tokens=40, **sampling) for each in PROMPTS]
        yield f"tokens {sampling}", [output.new_token_ids for output in outputs]
        yield f"tau {sampling}", [round(output.stats.tau, 6) for output in outputs]
        batch = decoder.generate_batch(PROMPTS, max_new_tokens=24, **sampling)
        yield f"batch {sampling}", [output.new_token_ids for output in batch]


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Serve the target with prompt lookup, and yield the server's address."""
    words = ["serve", "--drafter", "lookup", "--target", str(folder / "target"), "--port", "0"]
    words += ["--remote-sessions", "4", "--tree", "fixed", "--threads", "1"]
    words += ["--dtype", "float32"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jakiro", *words], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        yield next(line.split("ready:")[1].strip() for line in process.stderr if "ready:" in line)
    finally:
        process.terminate()
        process.wait()


def ask(url: str) -> Iterator[tuple[str, Any]]:
    """Yield texts of the server, and of trees that are drafted here."""
    client = httpx2.Client(timeout=120)
    model = client.get(f"{url}/models").json()["data"][0]["id"]
    message = {"role": "user", "content": "Why?"}
    for sampling in SAMPLING[:2]:
        more = {"model": model, "max_tokens": 40, **sampling}
        bodies = {
            "completions": {"prompt": PROMPTS[0], **more},
            "chat/completions": {"messages": [message], **more},
        }
        for path, body in bodies.items():
            choice = client.post(f"{url}/{path}", json=body).json()["choices"][0]
            yield f"{path} {sampling}", choice.get("text") or choice["message"]["content"]
        with RemoteDecoder(url, "lookup") as remote:
            output = remote.generate(PROMPTS[1], max_new_tokens=40, **sampling)
            yield f"remote {sampling}", output.new_token_ids


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for models and runs, which are reused")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "target").exists():
        write_inputs(folder)
    record: dict[str, Any] = {f"weights {name}": train(folder, name) for name in TRAINED}
    runs = {name: str(folder / "runs" / name / "drafter") for name in TRAINED}
    runs |= {"lookup": "lookup", "aded": "aded", "lm": f"lm={folder / 'small'}"}
    runs["lookup+jakiro"] = f"lookup+drafter={runs['jakiro']}"
    runs["aded+eagle3"] = f"aded+drafter={runs['eagle3']}"
    for name, drafter in runs.items():
        record |= {f"{name}: {key}": value for key, value in decode(folder, drafter)}
    with server(folder) as url:
        record |= dict(ask(url))
    given.out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
