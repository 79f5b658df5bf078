"""Recognizes waiting recordings together, in batches of pieces, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from recognition.transcriber import Audio, OpenRecording, Transcriber, Transcript


class QueueClosedError(RuntimeError):
    """The queue ends; what waits in it is not recognized."""


class RecordingTooLongError(ValueError):
    """A recording is longer than is accepted."""


class RecognitionLateError(RuntimeError):
    """A recording could not be recognized in time."""


@dataclass(eq=False)
class _Job:
    recording: OpenRecording
    most_seconds: float
    deadline: float
    urgent: bool
    answer: Future[Transcript] = field(default_factory=Future)

    def settle(self, now: float) -> bool:
        """Give the answer if there is one, or an error; whether the job is done."""
        recording, error = self.recording, None
        if self.answer.cancelled():
            return True
        if recording.failure is not None:
            error = recording.failure
        elif recording.seconds > self.most_seconds:
            error = RecordingTooLongError(f"it is longer than {self.most_seconds:g} s")
        elif not recording.finished and now > self.deadline:
            error = RecognitionLateError("the server is too busy to recognize it in time")
        elif not recording.finished:
            return False
        with suppress(InvalidStateError):  # cancelled in the meantime
            if error is None:
                self.answer.set_result(recording.transcript)
            else:
                self.answer.set_exception(error)
        return True


class RecognitionQueue:
    """Recordings that one model recognizes, each of them piece by piece in turn.

    Args:
        transcriber: The model.
        on_batch: Called in the queue's thread with the number of recordings in a batch and the seconds that it took.
    """

    def __init__(self, transcriber: Transcriber, on_batch: Callable[[int, float], object] | None = None) -> None:
        self._transcriber, self._on_batch = transcriber, on_batch
        self._jobs: list[_Job] = []
        """In the order of their turns."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="recognition", daemon=True)
        self._thread.start()

    def submit(
        self,
        audio: Audio,
        sample_rate: int | None = None,
        *,
        words: bool,
        language: str = "",
        within_s: float,
        most_seconds: float = float("inf"),
        urgent: bool = False,
    ) -> Future[Transcript]:
        """Recognize a recording; its transcript, later. A cancelled one is given up after the batch in progress.

        Args:
            audio: As for `Transcriber.transcribe`; likewise the next two.
            sample_rate: Of samples, in Hz.
            words: Whether to find the words' times.
            language: As for `Transcriber.transcribe`.
            within_s: Time after which the recording is given up.
            most_seconds: Longest recording.
            urgent: Whether its turns come before those of others, as for a stream that somebody speaks into.

        Raises:
            QueueClosedError: The queue has ended.
            DecodeError: Times are asked for, and the recognizer does not know when words are; or the model cannot be
                told the language.
        """
        recording = self._transcriber.open(audio, sample_rate, words=words, language=language)
        job = _Job(recording, most_seconds, time.monotonic() + within_s, urgent)
        with self._changed:
            if self._closed:
                raise QueueClosedError("the server ends")
            self._jobs.append(job)
            self._changed.notify()
        return job.answer

    def __len__(self) -> int:
        return len(self._jobs)

    def close(self, patience_s: float = 0.0) -> None:
        """End the thread after its batch; what waits gets a `QueueClosedError`.

        Args:
            patience_s: How long to wait for the thread.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        if patience_s:
            self._thread.join(patience_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    break
                jobs = sorted(self._jobs, key=lambda job: not job.urgent)  # a stable sort
            self._advance(jobs)
        for job in self._jobs:
            with suppress(InvalidStateError):
                job.answer.set_exception(QueueClosedError("the server ends"))

    def _advance(self, jobs: list[_Job]) -> None:
        """Recognize a batch, and put the jobs that it was of behind the others."""
        begin = time.monotonic()
        turns = [job.recording.turns for job in jobs]
        waiting = [job for job in jobs if not job.answer.cancelled() and begin <= job.deadline]
        try:
            self._transcriber.advance([job.recording for job in waiting])
        except Exception as error:  # a bug: none of them may wait for ever
            for job in waiting:
                job.recording.failure = error
        now = time.monotonic()
        done = {job for job in jobs if job.settle(now)}
        served = {job for job, before in zip(jobs, turns, strict=True) if job.recording.turns > before}
        with self._changed:
            left = [job for job in self._jobs if job not in done]
            self._jobs = sorted(left, key=lambda job: job in served)
        if served and self._on_batch is not None:
            self._on_batch(len(served), now - begin)
