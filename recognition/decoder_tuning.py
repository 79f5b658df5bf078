"""Counts the errors of a decoder with other values of its parameters, on speech that is encoded once.

Which values are tried, a method of search says; see `tasks/search/methods`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from recognition.decoding_pool import DecodingPool, useful_processes
from recognition.recognizer import Recognizer
from speech.scoring import ErrorCounts, score_utterance

E = TypeVar("E")


class DecoderTrials(Generic[E]):
    """Searches the same speech again and again, each time with other values; a context manager.

    Args:
        recognizer: The model; its decoder's configuration gives all other fields.
        encoded: Transcripts of batches, and what the recognizer has encoded.
        processes: Processes for a slow search, as far as the work is worth them.
        count: Number of trials to expect.

    Raises:
        DecodeError: The recognizer's decoders cannot be tuned.
    """

    def __init__(
        self, recognizer: Recognizer[E], encoded: Sequence[tuple[Sequence[str], E]], processes: int = 1, count: int = 1
    ) -> None:
        recognizer.spec.system.require("tuning")
        self.utterances = sum(len(texts) for texts, _ in encoded)
        self._recognizer, self._encoded = recognizer, encoded
        useful = useful_processes(recognizer, processes, count * self.utterances)
        if useful < 2:
            recognizer.prepare()  # the trials share what is read here
        self._pool = DecodingPool[Sequence[str]](recognizer, useful)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def errors(self, values: Mapping[str, Any], watch: Callable[[], object] = lambda: None) -> ErrorCounts:
        """Errors over all utterances.

        Args:
            values: By field of the decoder's configuration.
            watch: Called after each batch; may raise to end the trial.

        Raises:
            DecodeError: Hypotheses cannot be found with these values.
        """
        self._pool.use(self._recognizer.with_decoder(self._recognizer.cfg.model_copy(update=dict(values))))
        errors = ErrorCounts()
        for texts, hypotheses in self._pool.each(self._encoded):
            for text, hypothesis in zip(texts, hypotheses, strict=True):
                errors += score_utterance(text, self._recognizer.spec.comparable(hypothesis))
            watch()
        return errors
