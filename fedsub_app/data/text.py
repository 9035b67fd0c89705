"""Texts as tokens: tokenizers, samples of a fixed length, and the sources of Python's standard library."""

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedsub_app.common.errors import UserError, one_line
from fedsub_app.common.own_code import folder_or_hub, packaged
from fedsub_app.common.tasks import IGNORED

Encode = Callable[[Sequence[str]], list[list[int]]]
PAD, UNKNOWN = 0, 1  # the first two tokens of a tokenizer that is made of the training texts
TRAINED = ("characters", "words", "bpe")
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # of Python's sources; other characters are unknown
PACKAGE_CHARACTERS = 60_000  # of each package, at most
SOURCE_LENGTH = 80  # characters of a sample of sources
TEST_SHARE = 6  # every sixth sample of a package is for testing


class Tokenizer(NamedTuple):
    """A function from texts to tokens, the number of different tokens, and the token that pads a text's end."""

    encode: Encode
    size: int
    pad: int = PAD


def tokenizer_of(name: str, texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Return a tokenizer; those of ``TRAINED`` have at most ``vocabulary`` tokens."""
    if name == "characters":
        return _of_characters([letter for letter, _ in Counter("".join(texts)).most_common(vocabulary - 2)])
    try:
        if name in TRAINED:
            return _trained(name, texts, vocabulary)
        if tokenizer := pretrained_tokenizer(name):
            pad = tokenizer.pad_token_id or PAD  # decoders take their answer at the last token before it
            return Tokenizer(lambda some: tokenizer(list(some))["input_ids"] if some else [], len(tokenizer), pad)
    except ImportError as error:
        package = "tokenizers" if name in TRAINED else "transformers"
        raise UserError(f"tokenizer = {name!r}: needs the package {package}; `pip install {package}`") from error
    except Exception as error:  # code of others
        raise UserError(f"tokenizer = {name!r}: {one_line(error)[:200]}") from error
    raise UserError(f"tokenizer = {name!r}: allowed are {', '.join(TRAINED)}, or 'transformers:FOLDER'")


def pretrained_tokenizer(name: str) -> Any:
    """Return the tokenizer of transformers that the setting names; None where it names another one."""
    kind, _, folder = name.partition(":")
    if kind == "package":
        kind, folder = "transformers", str(packaged(folder))
    if kind != "transformers" or not folder:
        return None
    with folder_or_hub(folder):
        return import_module("transformers").AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


@lru_cache(maxsize=4)
def vocabulary_digest(name: str) -> str:
    """Return a digest of the vocabulary of a tokenizer of transformers; "" where the setting names another one."""
    found = pretrained_tokenizer(name)
    return hashlib.sha256(repr(sorted(found.get_vocab().items())).encode()).hexdigest()[:16] if found else ""


def _of_characters(alphabet: Sequence[str]) -> Tokenizer:
    numbers = {letter: number for number, letter in enumerate(alphabet, 2)}
    return Tokenizer(lambda texts: [[numbers.get(one, UNKNOWN) for one in text] for text in texts], len(alphabet) + 2)


def _trained(name: str, texts: Sequence[str], vocabulary: int) -> Tokenizer:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns of every fork
    package = import_module("tokenizers")
    kind, trainer_kind = ("WordLevel", "WordLevelTrainer") if name == "words" else ("BPE", "BpeTrainer")
    tokenizer = package.Tokenizer(getattr(package.models, kind)(unk_token="[UNK]"))
    tokenizer.normalizer = package.normalizers.Lowercase()
    tokenizer.pre_tokenizer = package.pre_tokenizers.Whitespace()
    how = {"vocab_size": vocabulary, "special_tokens": ["[PAD]", "[UNK]"], "show_progress": False}
    tokenizer.train_from_iterator(texts, getattr(package.trainers, trainer_kind)(**how))
    return Tokenizer(lambda some: [text.ids for text in tokenizer.encode_batch(list(some))], tokenizer.get_vocab_size())


def padded(tokens: Sequence[Sequence[int]], length: int, pad: int = PAD) -> tuple[Tensor, Tensor]:
    """Return each text's first tokens and their mask, 1 or 0, int64 [n, length]; an empty text's first is 1."""
    rows = [[*text[:length], *[pad] * (length - len(text))] for text in tokens]
    sizes = torch.tensor([max(len(text), 1) for text in tokens])[:, None]
    return torch.tensor(rows, dtype=torch.int64).view(-1, length), (torch.arange(length) < sizes).long()


def next_tokens(tokens: Sequence[Sequence[int]], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return samples of the texts in a row, without overlap: tokens, the next ones, and the number of their text.

    The first two are int64 [n, length], the next ones -100 behind the end of a text; the numbers are int64 [n].
    """
    starts = [(number, k) for number, text in enumerate(tokens) for k in range(0, max(len(text) - 1, 0), length)]
    samples = [tokens[number][k : k + length + 1] for number, k in starts]
    x, _ = padded([sample[:-1] for sample in samples], length)
    y, _ = padded([sample[1:] for sample in samples], length, IGNORED)
    return x, y, torch.tensor([number for number, _ in starts], dtype=torch.int64)


def python_packages() -> dict[str, Path]:
    """Return the packages of Python's standard library that have enough sources, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    without = {"site-packages", "test", "idlelib", "encodings", "turtledemo", "pydoc_data", "ensurepip"}
    folders = [file.parent for file in sorted(root.glob("*/__init__.py")) if file.parent.name not in without]
    enough = 20 * SOURCE_LENGTH
    return {folder.name: folder for folder in folders if sum(f.stat().st_size for f in folder.glob("*.py")) > enough}


def source_samples(folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (x, y) of a package for training and for testing: characters and the next ones, int64 [n, 80]."""
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob("*.py")))
    x, y, _ = next_tokens(_of_characters(ALPHABET).encode([text[:PACKAGE_CHARACTERS]]), SOURCE_LENGTH)
    test = torch.arange(1, len(x) + 1) % TEST_SHARE == 0
    return (x[~test], y[~test]), (x[test], y[test])
