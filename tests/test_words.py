"""The vocabulary of the code: words that readers of the papers, vLLM and transformers know."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("moa", "jakiro", "inference", "training", "tests")

# What to say instead stands in docs/concepts/glossary.md.
DENIED = {
    "law": "distribution, probabilities",
    "laws": "distributions, probabilities",
    "drawn": "sampled",
    "judge": "accept",
    "judged": "accepted, compared",
    "adopt": "set",
    "adopts": "sets",
    "settle": "commit, publish",
    "settles": "commits, publishes",
    "conclude": "finish",
    "concludes": "finishes",
    "evidence": "inputs",
    "bank": "experts",
    "remember": "encode, keep",
    "remembers": "keeps",
    "told": "notified, given",
    "shall": "must, or the present tense",
    "turns": "request index, order; chat turns",
}
# A chat has turns.
CHAT = re.compile(r"chat|turn|conversation|dialogue|message|prompt", re.IGNORECASE)


def _words(text: str) -> Iterator[str]:
    """Yield the words of prose or of an identifier, in lower case."""
    for part in re.findall(r"[A-Za-z]+", text):
        yield from (word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", part))


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield identifiers, comments and docstrings, each with its line."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        is_docstring = token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""'))
        if is_docstring or token.type in {tokenize.NAME, tokenize.COMMENT}:
            for number, line in enumerate(token.string.splitlines()):
                yield token.start[0] + number, line


def _found() -> Iterator[str]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == Path(__file__):
                continue
            source = path.read_text()
            if not any(word in source.lower() for word in DENIED):
                continue
            about_chats = bool(CHAT.search(source))
            for line, text in _texts(path):
                for word in _words(text):
                    if word in DENIED and not (word == "turns" and about_chats):
                        yield f"{path.relative_to(ROOT)}:{line}: {word} -> {DENIED[word]}"


def test_no_word_of_a_private_vocabulary_is_used() -> None:
    assert list(_found()) == []
