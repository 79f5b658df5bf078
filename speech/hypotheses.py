"""What recognition gives: words with times, and hypotheses."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


class DecodeError(ValueError):
    """Log posteriors that cannot be decoded: wrong shape or number of tokens, invalid lengths, or NaN."""


@dataclass(frozen=True)
class Word:
    """A recognized word."""

    word: str
    """The text of the word."""
    start: float
    """Start of its first token, in seconds from the start of the recording."""
    duration: float
    """Seconds until the end of its last token. CTC tokens are short, so the word tends to be slightly longer."""
    confidence: float
    """Mean of its tokens' highest posteriors, 0 to 1; from a search of words, the word's posterior."""


@dataclass(frozen=True)
class Alternative:
    """One of several hypotheses of an utterance."""

    text: str
    """Its words."""
    score: float
    """What the search gave it."""
    posterior: float
    """Its probability among all hypotheses that the search ended with, 0 to 1."""
    word_frames: list[tuple[int, int]] = field(default_factory=list)
    """First output frame of each word and the one after its last; empty unless words are searched."""
    word_confidences: list[float] = field(default_factory=list)
    """Posterior of each word over the final hypotheses of the search; empty unless words are searched."""


@dataclass(frozen=True)
class Hypothesis:
    """The recognition result for one utterance."""

    tokens: list[int] = field(default_factory=list)
    """Token ids, blanks removed and repetitions merged."""
    text: str = ""
    """The tokens as text."""
    score: float = 0.0
    """Natural log probability of the best alignment (greedy), of all alignments kept by the search (others), or of the
    tokens (decoder networks), with the weighted language model and word scores added, if any."""
    frames: list[int] = field(default_factory=list)
    """Start of each token in the best alignment, in output frames of the model."""
    confidence: float = 0.0
    """Mean of the tokens' highest posteriors, 0 to 1; without tokens, the mean posterior of the blank; 0 without
    frames. Searches of words: mean of `word_confidences`; without words, the posterior of silence."""
    word_confidences: list[float] = field(default_factory=list)
    """Posterior of each word over the final hypotheses of the search, or, of a decoder network, the mean probability of
    its tokens; empty for other searches of tokens."""
    nbest: list[Alternative] = field(default_factory=list)
    """The best hypotheses including this one, best first; empty unless more than one is requested."""
    word_frames: list[tuple[int, int]] = field(default_factory=list)
    """First output frame of each word and the one after its last, if the search tells; otherwise the tokens do."""
    language: str = ""
    """Code of the language that the decoder network found most probable; empty unless it chooses one."""

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON value."""
        return asdict(self)
