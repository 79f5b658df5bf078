"""Tokens: the output units of an acoustic model, and their conversion from and to text.

Index 0 is always the CTC blank; for decoder networks, it is the start and the end of a text. The space between words is
written "▁", to make it visible among the symbols; BPE pieces start with it, as in sentencepiece. A tokenizer is trained
on the training transcripts and stored as a JSON value:

    tokenizer = train_tokenizer(TokenConfig(kind="bpe", vocab_size=500), texts)
    same = tokenizer_from_dict(tokenizer.to_dict())

Texts must be normalized: single spaces between words, none at the ends. For such texts, `decode(encode(text)) == text`.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError
from typing_extensions import override

from configurable.configuration import Configuration
from configurable.extras import install_remedy
from speech.scripts import primary

BLANK_SYMBOL = "<blank>"
SPACE_SYMBOL = "▁"

# sentencepiece silently skips training lines that are longer than this limit (default: 4,192 bytes).
_MAX_LINE_BYTES = 1 << 20
_MULTILINGUAL = 51_865
"""Tokens of a Whisper model for several languages, at least; those for English only have fewer."""
AUTO = "auto"
"""In place of a language's code: that of each utterance."""
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
"""What Whisper's token for audio without speech is called."""
_LONGEST_PROMPT = 223
"""Tokens of Whisper's prompt at most, as in the published code: half of its positions less one."""


_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _VISIBLE}
"""The byte that each letter of a byte-level piece stands for (Radford et al. 2019, published code of GPT-2)."""
_BYTES |= {chr(0x100 + number): byte for number, byte in enumerate(sorted(set(range(256)) - set(_VISIBLE)))}


class TokenError(ValueError):
    """An unknown unit, a token id out of range, or a vocabulary that cannot be trained or read.

    Attributes:
        symbols: The unknown characters or words, each once, in order of appearance; empty for other errors.
    """

    def __init__(self, message: str, symbols: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.symbols = list(symbols)


class TokenConfig(Configuration):
    """The output units of a model."""

    kind: Literal["characters", "bpe", "words"] = "characters"
    """`characters` of the training texts, byte-pair pieces (`bpe`: Sennrich 2016, arXiv 1508.07909), or `words`."""
    vocab_size: int = Field(default=256, ge=2)
    """Number of tokens including the blank, for `bpe` and `words` (the most frequent words). This is an upper bound: a
    small corpus may not contain that many. Ignored for `characters`."""


class Tokenizer(ABC):
    """Converts text to token ids and back.

    Attributes:
        symbols: The written form of every token; index 0 is "<blank>".
        start: Tokens that precede every text in the input of a decoder network.
        end: Token that ends a text in its output. Texts have no blanks, so the blank's number serves as both.
        suppressed: Tokens that a decoder network must not put out.
        suppressed_first: Those that it must not put out as the first one, among them perhaps `end`.
        opening: Place in `start` of the token behind which a decoder network predicts the language, or `no_speech`.
        no_speech: Token that it predicts there if there is no speech; None if it has not learned that.
        languages: Tokens of the languages, by code, of which one takes the place behind `opening` for each utterance;
            empty if it is the same for all, or none precedes them.
        written: Whether texts are written as people write: hypotheses are normalized before they are compared with
            transcripts, which are.
    """

    kind: ClassVar[str]
    written: ClassVar[bool] = False
    blank = 0
    start: tuple[int, ...] = (0,)
    end: int = 0
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    opening: int = 0
    no_speech: int | None = None
    languages: Mapping[str, int] = {}
    symbols: list[str]

    @property
    def size(self) -> int:
        """Number of tokens including the blank: the width of the model's output."""
        return len(self.symbols)

    def start_of(self, language: str) -> tuple[int, ...]:
        """Tokens that precede a text of a language.

        Args:
            language: BCP 47 tag, such as `en` or `de-CH`.

        Raises:
            TokenError: The language matters, and is none of `languages`.
        """
        if not self.languages:
            return self.start
        number = self.languages.get(primary(language))
        if number is None:
            raise TokenError(f"{language!r} is none of the languages of the tokens ({', '.join(self.languages)})")
        return (*self.start[: self.opening + 1], number, *self.start[self.opening + 2 :])

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a normalized text (none for an empty one).

        Raises:
            TokenError: The text contains a unit that is not among the symbols.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of a sequence of tokens without blanks; words are separated by single spaces.

        Raises:
            TokenError: An id is the blank or out of range.
        """

    @abstractmethod
    def pieces(self) -> list[bytes]:
        """What each token adds to a text, in UTF-8; spaces are between words. Nothing for those that are no text."""

    def word_groups(self, ids: Sequence[int]) -> list[list[int]]:
        """Places of the tokens of each word of `decode(ids)`; a space separates words and belongs to none."""
        groups: list[list[int]] = []
        words: list[str] = []
        for place in range(len(ids)):
            before, words = words, self.decode(ids[: place + 1]).split()
            if words == before:
                continue
            if len(words) > len(before):
                groups.append([])
            groups[-1].append(place)
        return groups

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON value from which `tokenizer_from_dict` makes the same tokenizer."""

    @classmethod
    @abstractmethod
    def train(cls, cfg: TokenConfig, texts: Iterable[str]) -> Tokenizer:
        """Trains a tokenizer on texts."""

    @classmethod
    @abstractmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Tokenizer:
        """Rebuilds a tokenizer from the result of `to_dict`."""

    def _unknown(self, text: str, symbols: Iterable[str]) -> TokenError:
        names = list(dict.fromkeys(symbols))
        shown = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
        short = text if len(text) <= 60 else text[:59] + "…"
        return TokenError(
            f"{shown} in {short!r}: not among the {self.size} tokens ({self.kind}); normalize the text as the "
            "training texts were, or train the tokenizer on texts that contain it",
            names,
        )


class TrainedTokenizer(Tokenizer):
    """Tokens of training transcripts; behind them there may be others, which stand for languages."""

    def with_languages(self, languages: Iterable[str]) -> Self:
        """The tokens of transcripts, and one for each language behind them, of which one precedes each text.

        Args:
            languages: BCP 47 tags; of each, the primary language counts. With none, no language precedes a text.

        Raises:
            TokenError: A text has such a token.
        """
        text, codes = self.symbols[: self.num_text], dict.fromkeys(filter(None, map(primary, languages)))
        added = [f"<|{code}|>" for code in codes]
        if clash := set(text).intersection(added):
            raise TokenError(f"the texts have the token {min(clash)}, which stands for a language: remove it from them")
        made = copy(self)
        made.symbols = text + added
        made.languages = {code: len(text) + place for place, code in enumerate(codes)}
        made.suppressed = tuple(made.languages.values())
        made.start = (self.start[0], *made.suppressed[:1])
        return made

    @property
    def num_text(self) -> int:
        """Number of tokens without those of languages: the blank, and those of transcripts."""
        return self.size - len(self.languages)

    @override
    def decode(self, ids: Sequence[int]) -> str:
        for token in ids:
            if not 0 < token < self.num_text:
                raise TokenError(f"token {token} is not text: ids are 1 to {self.num_text - 1} (0 is the blank)")
        return " ".join(self._join([self.symbols[token] for token in ids]).split())

    @override
    def pieces(self) -> list[bytes]:
        text = [self._piece(symbol) for symbol in self.symbols[1 : self.num_text]]
        return [b"", *text, *(b"" for _ in self.languages)]

    def _join(self, pieces: list[str]) -> str:
        return "".join(pieces).replace(SPACE_SYMBOL, " ")

    def _piece(self, symbol: str) -> bytes:
        return self._join([symbol]).encode()

    @override
    def to_dict(self) -> dict[str, Any]:
        languages = {"languages": list(self.languages)} if self.languages else {}
        return {"kind": self.kind, **self._content(), **languages}

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """What `from_dict` needs beside the kind."""


class _ListedTokenizer(TrainedTokenizer):
    """A tokenizer defined by a list of symbols."""

    def __init__(self, symbols: Sequence[str]) -> None:
        self.symbols = list(symbols)
        if not self.symbols or self.symbols[0] != BLANK_SYMBOL:
            raise TokenError(f"the first symbol must be {BLANK_SYMBOL!r}")
        if len(set(self.symbols)) != self.size:
            raise TokenError("a symbol is listed twice")
        self._ids = {symbol: index for index, symbol in enumerate(self.symbols) if index}

    @override
    def _content(self) -> dict[str, Any]:
        return {"symbols": self.symbols[: self.num_text]}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Tokenizer:
        symbols = value.get("symbols")
        if not isinstance(symbols, list) or not all(isinstance(symbol, str) for symbol in symbols):
            raise TokenError(f"a {cls.kind} tokenizer needs `symbols`, a list of strings")
        return cls(symbols)

    def _look_up(self, text: str, units: Sequence[str]) -> list[int]:
        try:
            return [self._ids[unit] for unit in units]
        except KeyError:
            raise self._unknown(text, (unit for unit in units if unit not in self._ids)) from None


class CharacterTokenizer(_ListedTokenizer):
    """Every character is a token, including the space."""

    kind = "characters"

    @classmethod
    def train(cls, cfg: TokenConfig, texts: Iterable[str]) -> Tokenizer:
        """Uses the characters of the texts, sorted by code point; the space comes first."""
        characters: set[str] = set()
        for text in texts:
            characters.update(_checked(text))
        if not characters:
            raise TokenError("there is no text to take characters from")
        return cls([BLANK_SYMBOL, *(SPACE_SYMBOL if c == " " else c for c in sorted(characters))])

    def encode(self, text: str) -> list[int]:
        """Returns a token for each character."""
        return self._look_up(text, _checked(text).replace(" ", SPACE_SYMBOL))


class WordTokenizer(_ListedTokenizer):
    """Every word is a token; a word outside the vocabulary is an error, not an unknown-word token."""

    kind = "words"

    @classmethod
    def train(cls, cfg: TokenConfig, texts: Iterable[str]) -> Tokenizer:
        """Uses the `vocab_size` − 1 most frequent words; ties are sorted alphabetically."""
        counts = Counter(word for text in texts for word in _checked(text).split())
        if not counts:
            raise TokenError("there is no text to take words from")
        words = sorted(counts, key=lambda word: (-counts[word], word))
        return cls([BLANK_SYMBOL, *words[: cfg.vocab_size - 1]])

    def encode(self, text: str) -> list[int]:
        """Returns a token for each word."""
        return self._look_up(text, _checked(text).split())

    @override
    def _piece(self, symbol: str) -> bytes:
        return f" {symbol}".encode()

    @override
    def _join(self, pieces: list[str]) -> str:
        return " ".join(pieces)


class BpeTokenizer(TrainedTokenizer):
    """Byte-pair pieces of a sentencepiece model (Kudo and Richardson 2018, arXiv 1808.06226).

    The model's unknown piece must have id 0, which is the blank here, so that the ids of all other pieces agree. A text
    that needs the unknown piece is an error.
    """

    kind = "bpe"

    def __init__(self, model: bytes) -> None:
        import sentencepiece

        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError) as error:
            raise TokenError("the sentencepiece model cannot be read") from error
        if self._processor.unk_id() != 0:
            raise TokenError("the sentencepiece model's unknown piece must have id 0, which is the blank here")
        pieces = [self._processor.id_to_piece(index) for index in range(1, self._processor.get_piece_size())]
        self.symbols = [BLANK_SYMBOL, *pieces]

    @classmethod
    def train(cls, cfg: TokenConfig, texts: Iterable[str]) -> Tokenizer:
        """Learns merges from the texts; the same texts give the same bytes.

        Raises:
            TokenError: There is no text, or `vocab_size` is smaller than its number of distinct characters.
        """
        lines = [line for line in map(_checked, texts) if line.strip()]
        if not lines:
            raise TokenError("there is no text to learn pieces from")
        needed = len({character for line in lines for character in line} | {" "}) + 1
        if cfg.vocab_size < needed:
            raise TokenError(
                f"vocab_size {cfg.vocab_size} is smaller than the {needed} tokens that the texts' single characters "
                "need: raise it, or normalize the texts to fewer characters"
            )
        return cls(_train_sentencepiece(lines, cfg.vocab_size))

    def encode(self, text: str) -> list[int]:
        """Returns the pieces that result from the learned merges."""
        ids: list[int] = self._processor.encode(_checked(text))
        if 0 in ids:
            known = set("".join(self.symbols[1:])) | {" "}
            raise self._unknown(text, (character for character in text if character not in known))
        return ids

    @override
    def _content(self) -> dict[str, Any]:
        return {"model": base64.b64encode(self._model).decode("ascii")}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Tokenizer:
        """Reads the sentencepiece model from base64."""
        try:
            return cls(base64.b64decode(value["model"], validate=True))
        except (KeyError, TypeError, binascii.Error) as error:
            raise TokenError("a bpe tokenizer needs `model`, a sentencepiece model in base64") from error


class WhisperTokens(Configuration):
    """A pretrained Whisper model's tokens, and what it is asked for."""

    model: str
    """The model's `tokenizer.json`."""
    size: int = Field(ge=2, le=1 << 20)
    """Number of tokens, time stamps included: the model's `vocab_size`."""
    language: str = "en"
    """Code of the language, such as `en`, or `auto`: that of each utterance; ignored by models for English only."""
    task: Literal["transcribe", "translate"] = "transcribe"
    """Whether the text is in the language of the speech, or in English."""
    prompt: str = ""
    """What was said or written before, such as names; at most 223 tokens of it fit."""
    suppressed: tuple[int, ...] = ()
    """Numbers of the tokens that are never written."""
    suppressed_first: tuple[int, ...] = ()
    """Numbers of the tokens that are not written first."""


class WhisperTokenizer(Tokenizer):
    """Byte-level pieces of a pretrained Whisper model, as the package `tokenizers` reads them (Radford et al. 2022).

    Tokens that precede a text say what is wanted: the language, a transcription or translation, no time stamps. There
    is no blank: CTC needs another tokenizer.

    Args:
        about: The model's tokens, and what it is asked for.

    Raises:
        TokenError: The package is missing, it cannot read the model, or the model does not know the language.
    """

    kind = "whisper"
    blank = -1
    written = True

    def __init__(self, about: WhisperTokens) -> None:
        self._about, self._tokenizer = about, _read_byte_pieces(about.model)
        known = self._tokenizer.get_vocab_size()
        if known > about.size:
            raise TokenError(f"the tokenizer.json of a Whisper model has {known} tokens, but the model {about.size}")
        self.symbols = [self._tokenizer.id_to_token(index) or f"<|{index}|>" for index in range(about.size)]
        self.end = self._number("<|endoftext|>")
        several, preceding = about.size >= _MULTILINGUAL, self._preceding(about.prompt)
        if several and about.language == AUTO:
            self.languages = {symbol[2:-2]: self._number(symbol) for symbol in self._language_symbols()}
        language = next(iter(self.languages), about.language)
        asked = ("<|startoftranscript|>", f"<|{language}|>", f"<|{about.task}|>", "<|notimestamps|>")
        wanted = asked if several else (asked[0], asked[-1])
        self.start = (*preceding, *map(self._number, wanted))
        self.opening = len(preceding)
        silent = (self._tokenizer.token_to_id(symbol) for symbol in _NO_SPEECH)
        self.no_speech = next((number for number in silent if number is not None), None)
        self.suppressed, self.suppressed_first = about.suppressed, about.suppressed_first
        if wrong := [token for token in (*self.suppressed, *self.suppressed_first) if not 0 <= token < self.size]:
            raise TokenError(f"suppressed tokens {wrong[:5]} are out of range: there are {self.size}")

    def _number(self, symbol: str) -> int:
        number = self._tokenizer.token_to_id(symbol)
        if number is None:
            languages = [token[2:-2] for token in self._language_symbols()]
            raise TokenError(
                f"the Whisper tokenizer has no token {symbol}: use its own tokenizer.json, and one of its languages "
                f"({', '.join(languages) or 'none'})"
            )
        return int(number)

    def _language_symbols(self) -> list[str]:
        return sorted(token for token in self.symbols if re.fullmatch(r"<\|[a-z]{2,3}\|>", token))

    def _preceding(self, prompt: str) -> list[int]:
        if not prompt.split():
            return []
        tokens = self.encode(" ".join(prompt.split()))
        if len(tokens) > _LONGEST_PROMPT:
            raise TokenError(f"the prompt has {len(tokens)} tokens, more than {_LONGEST_PROMPT}: shorten it")
        return [self._number("<|startofprev|>"), *tokens]

    @classmethod
    def train(cls, cfg: TokenConfig, texts: Iterable[str]) -> Tokenizer:
        """Pretrained pieces are not trained.

        Raises:
            TokenError: Always.
        """
        raise TokenError("Whisper's tokenizer comes with the pretrained model: use characters, bpe or words here")

    def encode(self, text: str) -> list[int]:
        """Returns the pieces of the text; the first word begins with a space, as all others do."""
        return list(self._tokenizer.encode(f" {text}", add_special_tokens=False).ids) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of a sequence of tokens; what is no text (languages, time stamps) is left out."""
        for token in ids:
            if not 0 <= token < self.size:
                raise TokenError(f"token {token} is not text: ids are 0 to {self.size - 1}")
        return " ".join(self._tokenizer.decode([token for token in ids if token < self.end]).split())

    @override
    def pieces(self) -> list[bytes]:
        text = [symbol if number < self.end else "" for number, symbol in enumerate(self.symbols)]
        return [bytes(_BYTES[letter] for letter in symbol if letter in _BYTES) for symbol in text]

    def to_dict(self) -> dict[str, Any]:
        """Returns the model's tokenizer.json, and what it is asked for."""
        return {"kind": self.kind, **self._about.model_dump(mode="json")}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Tokenizer:
        """Reads what `to_dict` returned."""
        try:
            about = WhisperTokens.model_validate({name: item for name, item in value.items() if name != "kind"})
        except ValidationError as error:
            raise TokenError(f"this is no whisper tokenizer: {error}") from error
        return cls(about)

    def __getstate__(self) -> dict[str, Any]:
        """State for another process, which reads the model again."""
        return {"_about": self._about}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_about"])  # type: ignore[misc]


def _read_byte_pieces(model: str) -> Any:
    """The tokenizer of a tokenizer.json; what looks like a special token in a text is text."""
    try:
        import tokenizers
    except ImportError as error:
        raise TokenError(f"Whisper's tokenizer needs the package tokenizers: {install_remedy('pretrained')}") from error
    try:
        pieces = tokenizers.Tokenizer.from_str(model)
    except Exception as error:  # the package raises nothing more specific
        raise TokenError(f"the tokenizer.json of a Whisper model cannot be read: {error}") from error
    pieces.encode_special_tokens = True
    return pieces


def _train_sentencepiece(lines: list[str], vocab_size: int) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    # One thread: the order of equally frequent merges must not depend on timing. identity: texts are normalized
    # already.
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        num_threads=1,
        max_sentence_length=_MAX_LINE_BYTES,
        minloglevel=2,
    )
    return model.getvalue()


def _checked(text: str) -> str:
    if SPACE_SYMBOL in text:
        raise TokenError(
            f"the text {text[:60]!r} contains {SPACE_SYMBOL!r} (U+2581), reserved for the space",
            [SPACE_SYMBOL],
        )
    return text


TOKENIZERS: dict[str, type[Tokenizer]] = {
    cls.kind: cls for cls in (CharacterTokenizer, BpeTokenizer, WordTokenizer, WhisperTokenizer)
}


def train_tokenizer(cfg: TokenConfig, texts: Iterable[str]) -> Tokenizer:
    """Trains the configured tokenizer on normalized texts; deterministic.

    Args:
        cfg: Kind and size of the vocabulary.
        texts: Normalized texts, read once; for `characters` and `words`, their order does not matter.

    Raises:
        TokenError: There is no text, or `vocab_size` is too small for it.
    """
    return TOKENIZERS[cfg.kind].train(cfg, texts)


def tokenizer_from_dict(value: Mapping[str, Any]) -> Tokenizer:
    """Rebuilds a tokenizer from the result of its `to_dict`.

    Raises:
        TokenError: The kind is unknown, or its data are missing or damaged.
    """
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in TOKENIZERS:
        raise TokenError(f"unknown kind of tokenizer {kind!r}: use one of {', '.join(sorted(TOKENIZERS))}")
    made, languages = TOKENIZERS[kind].from_dict(value), value.get("languages")
    if not languages:
        return made
    codes = isinstance(languages, list) and all(isinstance(code, str) for code in languages)
    if not codes or not isinstance(made, TrainedTokenizer):
        raise TokenError(f"`languages` of a {kind} tokenizer must be a list of codes such as en")
    return made.with_languages(languages)
