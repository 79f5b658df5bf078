"""The model that a server uses: replaced while requests are in progress, which keep the one that they began with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from recognition.chunk_batches import ChunkBatches
from recognition.frame_stream import streaming_encoder
from recognition.serving.limits import ApiError
from recognition.serving.queue import RecognitionQueue
from recognition.transcriber import Transcriber
from speech.hypotheses import DecodeError
from speech.models.networks.base import Advance


class LoadedModel:
    """A version of a model, ready for use.

    Args:
        version: Its version; empty if it has none.
        transcriber: The model.
        discard: Called when it has been replaced and nothing uses it any more, to remove its files.
        on_batch: As for `RecognitionQueue`.

    Attributes:
        queue: What recognizes with it.
        loaded_at: Seconds since 1970.
        words: Whether it knows when words are.
        advance: Computes the chunks of all streams; None if the recognizer needs whole utterances.
    """

    def __init__(
        self,
        version: str,
        transcriber: Transcriber,
        discard: Callable[[], object] = lambda: None,
        on_batch: Callable[[int, float], object] | None = None,
    ) -> None:
        self.version, self.transcriber, self.discard = version, transcriber, discard
        self.queue = RecognitionQueue(transcriber, on_batch)
        self.loaded_at = int(time.time())
        self.words = "word times" in transcriber.spec.system.abilities
        self.advance: Advance | None = None
        with suppress(DecodeError):
            self.advance = ChunkBatches(streaming_encoder(transcriber.recognizer)).advance
        self.users = 0

    def told(self, language: str) -> str:
        """What the model is told of the language that a client names: models without a choice are told nothing.

        Args:
            language: Its code; empty if the client names none.

        Raises:
            ApiError: The model knows languages, and not this one.
        """
        recognizer = self.transcriber.recognizer
        if not (language and recognizer.languages):
            return ""
        try:
            recognizer.check_language(language)
        except DecodeError as error:
            raise ApiError(400, str(error), "invalid_value", "language") from error
        return language


class ModelSwitch:
    """The current version of a model, and the state of its replacement.

    Args:
        name: The model's name for clients.
        model: The version to begin with.

    Attributes:
        failures: How many versions could not be loaded, or looks at the registry failed.
        problem: Why the newest version is not in use; empty if it is.
        on_change: Called after each change, with a sentence, and whether it is a problem.
    """

    def __init__(self, name: str, model: LoadedModel) -> None:
        self.name = name
        self._current = model
        self._lock = threading.Lock()
        self.failures, self.replaced = 0, 0
        self.problem = ""
        self.on_change: Callable[[str, bool], object] = lambda text, problem: None

    @property
    def current(self) -> LoadedModel:
        """The version for new requests."""
        return self._current

    @contextmanager
    def use(self) -> Iterator[LoadedModel]:
        """The current version, which stays loaded until the block ends."""
        with self._lock:
            model = self._current
            model.users += 1
        try:
            yield model
        finally:
            with self._lock:
                model.users -= 1
                unused = not model.users and model is not self._current
            if unused:
                _end(model)

    def replace(self, model: LoadedModel) -> None:
        """Use another version for new requests.

        Args:
            model: It.
        """
        with self._lock:
            old, self._current = self._current, model
            unused = not old.users
            self.replaced += 1
            self.problem = ""
        if unused:
            _end(old)
        self.on_change(f"version {model.version} of {self.name} replaces version {old.version}", False)

    def fail(self, problem: str) -> None:
        """Note that another version, or the registry, cannot be used: the current version goes on.

        Args:
            problem: Why.
        """
        with self._lock:
            news = problem != self.problem
            self.problem = problem
            self.failures += 1
        if news:
            self.on_change(problem, True)

    def recovered(self) -> None:
        """Note that the current version is the wanted one."""
        with self._lock:
            self.problem = ""


def _end(model: LoadedModel) -> None:
    """End a version that nobody uses, in the background: its batch in progress may take a while."""

    def end() -> None:
        model.queue.close(patience_s=600.0)
        model.discard()

    threading.Thread(target=end, name="retire", daemon=True).start()
