"""The vocabulary of code and documentation: words of the papers, vLLM and transformers."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("moa", "jakiro", "inference", "training", "tests", "configs", "docs")

# docs/concepts/glossary.md has the words to use instead.
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
    "marginal": "per position",
    "rounds": "steps",
}
DENIED_PHRASES = {"plain decoding": "autoregressive decoding, decoding without drafts"}
OTHERS = ("in_place",)  # a term of torch
# Words that only names of code must not contain: prose needs them ("plain text").
DENIED_NAMES = {
    "plain": "autoregressive",
    "place": "position, slot, node, path",
    "rollout": "ttt",
}
# Files about chats may contain the word `turns`.
CHAT = re.compile(r"chat|turn|conversation|dialogue|message|prompt", re.IGNORECASE)


def _words(text: str) -> Iterator[str]:
    """Yield the words of prose or of an identifier, in lower case."""
    for part in re.findall(r"[A-Za-z]+", text):
        yield from (word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", part))


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file, each with its line number."""
    if path.suffix == ".py":
        yield from _texts_of_code(path.read_text())
        return
    for number, line in enumerate(path.read_text().splitlines(), 1):
        is_prose = path.suffix != ".js"  # where backticks mark code, not strings
        yield number, re.sub(r"`[^`]*`", "", line) if is_prose else line


def _texts_of_code(source: str) -> Iterator[tuple[int, str]]:
    """Yield identifiers, comments, docstrings and other strings, each with its line number."""
    strings = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in {tokenize.NAME, tokenize.COMMENT, *strings}:
            for number, line in enumerate(token.string.splitlines()):
                yield token.start[0] + number, line


def _names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the identifiers of a file except attributes, each with its line number."""
    if path.suffix == ".js":
        yield from _names_of_script(path.read_text())
        return
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME and before != ".":  # others name their attributes
            yield token.start[0], token.string
        before = token.string


def _names_of_script(source: str) -> Iterator[tuple[int, str]]:
    """Yield the identifiers of a file in JavaScript, without attributes, strings and comments."""
    for number, line in enumerate(source.splitlines(), 1):
        code = re.sub(r"""//.*|/\*.*|^ *\* .*|"[^"]*"|`[^`]*`""", "", line)
        yield from ((number, name) for name in re.findall(r"(?<![.\w])[A-Za-z_]\w*", code))


def _files() -> Iterator[Path]:
    """Yield the files with English text."""
    yield from sorted(ROOT.glob("*.md"))
    for folder in FOLDERS:
        for kind in ("*.py", "*.md", "*.yaml", "*.jinja", "*.js", "*.html"):
            yield from sorted((ROOT / folder).rglob(kind))


def _found() -> Iterator[str]:
    for path in _files():
        source = path.read_text()
        if path == Path(__file__) or not any(
            word in source.lower() for word in (*DENIED, *DENIED_PHRASES)
        ):
            continue
        about_chats = bool(CHAT.search(source))
        for line, text in _texts(path):
            for word in _words(text):
                if word in DENIED and not (word == "turns" and about_chats):
                    yield f"{path.relative_to(ROOT)}:{line}: {word} -> {DENIED[word]}"
            for phrase, better in DENIED_PHRASES.items():
                if phrase in text.lower():
                    yield f"{path.relative_to(ROOT)}:{line}: {phrase} -> {better}"


def test_no_word_of_a_private_vocabulary_is_used() -> None:
    assert list(_found()) == []


def test_names_of_code_use_the_words_of_the_field() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name} -> {DENIED_NAMES[word]}"
        for folder in FOLDERS
        for kind in ("*.py", "*.js")
        for path in sorted((ROOT / folder).rglob(kind))
        for line, name in _names(path)
        for word in _words(name)
        if word in DENIED_NAMES and not name.startswith(("test_", *OTHERS))
    ]
    assert found == []
