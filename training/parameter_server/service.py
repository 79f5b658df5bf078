"""Answers requests for one share, applies each change once, and saves the share every few seconds.

The last answer to each learner stays in memory, so that a repeated request gets it again: a few bytes for `asgd`, the
size of the share for `easgd`.
"""

import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import zmq
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from storage.objects import ObjectStore
from training.parameter_server.layout import Layout
from training.parameter_server.messages import (
    UNREAD,
    Answer,
    Frames,
    MessageError,
    ServerRequest,
    pack,
    read_request,
    split,
    unpack,
)
from training.parameter_server.share import Share, ShareError

log = logging.getLogger(__name__)

SAVE_S = 5.0
"""Minimum interval between two saves."""
SAVE_SHARE = 0.1
"""Maximum fraction of the time that saving may take; a large share is saved less often."""
MAX_LEARNERS = 10_000
"""Maximum number of learners whose last answer is remembered."""
_CHANGES = ("push", "elastic")
_PREFIX = "optimizer."


class SavedError(ValueError):
    """A save is damaged."""


@dataclass(frozen=True)
class _Last:
    """A learner's last change, and its answer."""

    token: str
    number: int
    answer: Answer
    vector: Tensor | None = None


class ShareService:
    """The server of one share, without its socket.

    Args:
        share: An empty share.
        run: Identity of the training; saves of other trainings are not used.
        file: File in which the share is saved.
        fresh: Discard the last save.

    Raises:
        SavedError: If the file is damaged.
    """

    def __init__(self, share: Share, run: str, file: Path, fresh: bool) -> None:
        self.share, self.run, self.file = share, run, file
        self._last: dict[str, _Last] = {}
        self._changed = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._saving: Future[float] | None = None
        self._saved_at = 0.0
        if fresh:
            file.unlink(missing_ok=True)
        elif file.exists():
            self._load()

    # --- requests

    def handle(self, frames: Sequence["zmq.Frame"]) -> Frames | None:
        """Answer a request; returns None for an outdated one.

        Args:
            frames: Header and values, from any holder of the key.
        """
        number = UNREAD
        try:
            if not frames:
                raise MessageError("a request without a header")
            request = read_request(frames[0])
            number = request.number
            return self._answer(request, frames[1:])
        except (MessageError, ShareError) as error:
            return pack(Answer(number=number, error=str(error)))
        except Exception as error:  # one learner's request must not end the training of the others
            log.exception("request %d failed", number)
            return pack(Answer(number=number, error=f"the parameter server failed ({error!r}): see its log"))

    def _answer(self, request: ServerRequest, values: Sequence["zmq.Frame"]) -> Frames | None:
        if request.op in _CHANGES:
            return self._change(request, values)
        if request.op == "init":
            return pack(self._init(request, values))
        if request.op == "layout":
            return pack(self._header(request).model_copy(update={"layout": self.share.layout}))
        self._need_session(request)
        if request.op == "pull":
            # a copy: the next push must not change a message in transit
            return pack(self._header(request), [self.share.weights.clone()])
        tensors = self.share.tensors()
        sizes = tuple((name, tensor.numel()) for name, tensor in tensors.items())
        return pack(self._header(request).model_copy(update={"tensors": sizes}), list(tensors.values()))

    def _header(self, request: ServerRequest) -> Answer:
        return Answer(number=request.number, session=self.share.session, version=self.share.version)

    def _need_session(self, request: ServerRequest) -> None:
        held = self.share.session
        if not held:
            raise ShareError("this parameter server has no weights yet: send init first")
        if request.session not in ("", held):
            raise ShareError(f"session {request.session!r} is over, the weights belong to session {held!r}: join again")

    def _init(self, request: ServerRequest, values: Sequence["zmq.Frame"]) -> Answer:
        share = self.share
        known = bool(share.session) and share.session == request.session
        if not known:
            sizes = (("weights", share.layout.size), *request.tensors)
            if any(size < 0 for _, size in sizes):
                raise MessageError("a tensor has a negative size")
            tensors = split(unpack(values, sum(size for _, size in sizes)), sizes)
            share.begin(request.session, tensors.pop("weights"), tensors)
            self._last.clear()
            # saved at once: a restarted server could not continue without weights
            self._save()
            self.wait()
        return self._header(request).model_copy(update={"known": known})

    def _change(self, request: ServerRequest, values: Sequence["zmq.Frame"]) -> Frames | None:
        """Apply a push or an elastic update once; a repeated request gets the answer of the first one."""
        self._need_session(request)
        last = self._last.get(request.name)
        if last is not None and last.token == request.token and request.number <= last.number:
            repeated = request.number == last.number
            return pack(last.answer, [] if last.vector is None else [last.vector]) if repeated else None
        vector, staleness = None, 0
        if request.op == "push":
            grads = unpack(values, self.share.layout.num_grads)
            staleness = self.share.push(grads, request.version, request.lr)
        else:
            vector = self.share.elastic(unpack(values, self.share.layout.size), request.alpha)
        answer = self._header(request).model_copy(update={"staleness": staleness})
        self._last.pop(request.name, None)
        self._last[request.name] = _Last(request.token, request.number, answer, vector)
        if len(self._last) > MAX_LEARNERS:
            self._last.pop(next(iter(self._last)))
        self._changed = True
        return pack(answer, [] if vector is None else [vector])

    # --- saving

    def save_if_due(self) -> None:
        """Save changes if the last save is old enough; the file is written in a thread."""
        if not self._changed or (self._saving and not self._saving.done()):
            return
        took_s = self._saving.result() if self._saving else 0.0
        if time.monotonic() - self._saved_at >= max(SAVE_S, took_s / SAVE_SHARE):
            self._save()

    def _save(self) -> None:
        share = self.share
        tensors = {_PREFIX + name: tensor for name, tensor in share.tensors().items()}
        tensors["weights"] = share.weights.clone()
        # without vectors: an elastic update whose answer was lost with the server is applied again
        last = {
            name: [entry.token, entry.number, entry.answer.model_dump(mode="json", exclude_defaults=True)]
            for name, entry in self._last.items()
            if entry.vector is None
        }
        facts = {"run": self.run, "session": share.session, "version": share.version, "last": last}
        layout = share.layout.model_dump(mode="json")
        self._changed, self._saved_at = False, time.monotonic()
        metadata = {"facts": json.dumps(facts), "layout": json.dumps(layout)}
        self._saving = self._writer.submit(self._write, tensors, metadata)

    def _write(self, tensors: dict[str, Tensor], metadata: dict[str, str]) -> float:
        """Write a save atomically; returns the time that it took, in seconds."""
        began = time.monotonic()
        try:
            ObjectStore(self.file.parent).write(self.file.name, save(tensors, metadata))
        except Exception:
            log.exception("could not save to %s: is the disk full? Training continues", self.file)
        return time.monotonic() - began

    def _load(self) -> None:
        try:
            with safe_open(self.file, framework="pt") as file:
                metadata = file.metadata() or {}
                facts, layout = json.loads(metadata["facts"]), Layout.model_validate_json(metadata["layout"])
                if facts["run"] != self.run or layout != self.share.layout:
                    log.warning("%s belongs to another training and is not used", self.file)
                    return
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            self.share.begin(facts["session"], tensors.pop("weights"), _without_prefix(tensors))
            self.share.version = int(facts["version"])
            for name, (token, number, answer) in facts["last"].items():
                self._last[name] = _Last(str(token), int(number), Answer.model_validate(answer))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise SavedError(f"{self.file} cannot be read ({error}): remove it to restart the training") from error
        log.info("continuing with version %d of session %s", self.share.version, self.share.session)

    def wait(self) -> None:
        """Wait for a save in progress."""
        if self._saving:
            self._saving.result()

    def close(self) -> None:
        """Save changes, and wait for the save."""
        if self._changed:
            self._save()
        self._writer.shutdown(wait=True)


def _without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
