"""Messages that only two sides can read and make: AES-GCM, with keys that they have agreed on over CurveZMQ.

CurveZMQ's own cipher takes longer than all the rest of an exchange; processors have instructions for AES. Every
message has a number of its own, which makes its nonce: what was overheard and is said again is refused.
"""

import os
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from training.exchange.wire import Buffer

TAG_BYTES = 16
"""So much longer is a sealed chunk."""
_KEY_BYTES = 32
_NUMBER_BYTES = 8
_NAME_BYTES = 32


class Channel:
    """Messages in one direction; one side seals, the other opens.

    Args:
        key: 32 bytes that were used for nothing else.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0

    def seal(self, header: bytes, chunk: Buffer, out: Buffer) -> bytes:
        """Seal a message.

        Args:
            header: Its header.
            chunk: The rest.
            out: Memory for the sealed chunk, `TAG_BYTES` longer.

        Returns:
            The sealed header.
        """
        self._number += 1
        number = self._number.to_bytes(_NUMBER_BYTES, "big")
        self._cipher.encrypt_into(_nonce(b"chnk", number), chunk, None, out)
        return number + self._cipher.encrypt(_nonce(b"head", number), header, None)

    def open(self, header: Buffer, chunk: Buffer, room: bytearray) -> tuple[bytes, memoryview] | None:
        """Open a message.

        Args:
            header: The sealed header.
            chunk: The sealed chunk.
            room: Memory for the opened chunk, which may be shorter.

        Returns:
            Header and chunk, the latter a view of the memory; None if the message was made or altered by others, is not
            newer than the last, or does not fit.
        """
        length = len(chunk) - TAG_BYTES
        if not 0 <= length <= len(room):
            return None
        out = memoryview(room)[:length]
        number = bytes(header[:_NUMBER_BYTES])
        try:
            opened = self._cipher.decrypt(_nonce(b"head", number), header[_NUMBER_BYTES:], None)
            self._cipher.decrypt_into(_nonce(b"chnk", number), chunk, None, out)
        except (InvalidTag, ValueError):
            return None
        if int.from_bytes(number, "big") <= self._number:
            return None
        self._number = int.from_bytes(number, "big")
        return opened, out


@dataclass(frozen=True)
class Session:
    """What two sides have agreed on.

    Attributes:
        name: Of the session; no secret.
        requests: The asker's messages.
        answers: The answerer's.
    """

    name: bytes
    requests: Channel
    answers: Channel

    @classmethod
    def from_bytes(cls, agreed: bytes) -> "Session":
        """From what the asker has drawn and sent.

        Raises:
            ValueError: If it is of another length.
        """
        if len(agreed) != _NAME_BYTES + 2 * _KEY_BYTES:
            raise ValueError(f"{len(agreed)} bytes are no keys of a session")
        name, keys = agreed[:_NAME_BYTES], agreed[_NAME_BYTES:]
        return cls(name, Channel(keys[:_KEY_BYTES]), Channel(keys[_KEY_BYTES:]))


def draw() -> bytes:
    """Name and keys of a new session, for `Session.from_bytes`; to be sent only where nobody reads along."""
    return os.urandom(_NAME_BYTES // 2).hex().encode() + os.urandom(2 * _KEY_BYTES)


def _nonce(part: bytes, number: bytes) -> bytes:
    return part + number
