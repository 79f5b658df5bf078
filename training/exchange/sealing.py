"""Authenticated encryption of messages between two nodes: AES-GCM, with keys agreed on over CurveZMQ.

CurveZMQ's own cipher takes longer than the rest of an exchange, whereas processors have instructions for AES. Every
message has a unique number, which is part of its nonce, so replayed messages are refused.
"""

import os
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from training.exchange.messages import Buffer

TAG_BYTES = 16
"""Number of bytes by which a sealed chunk is longer."""
_KEY_BYTES = 32
_NUMBER_BYTES = 8
_NAME_BYTES = 32


class Channel:
    """Encrypted messages in one direction; one side seals, the other opens.

    Args:
        key: 32 bytes that are used for nothing else.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0

    def seal(self, header: bytes, chunk: Buffer, out: Buffer) -> bytes:
        """Seal a message.

        Args:
            header: The message's header.
            chunk: The message's chunk.
            out: Memory for the sealed chunk, `TAG_BYTES` longer than the chunk.

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
            room: Memory for the opened chunk; may be longer than needed.

        Returns:
            Header and chunk, the latter a view of `room`; None if the message was forged or altered, is not newer than
            the last one, or does not fit.
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
    """A session between two nodes: its name and its keys.

    Attributes:
        name: Name of the session; not secret.
        requests: Channel of the asker's messages.
        answers: Channel of the answerer's messages.
    """

    name: bytes
    requests: Channel
    answers: Channel

    @classmethod
    def from_bytes(cls, agreed: bytes) -> "Session":
        """Create a session from the bytes that the asker has drawn and sent.

        Raises:
            ValueError: If their number is wrong.
        """
        if len(agreed) != _NAME_BYTES + 2 * _KEY_BYTES:
            raise ValueError(f"{len(agreed)} bytes are not the keys of a session")
        name, keys = agreed[:_NAME_BYTES], agreed[_NAME_BYTES:]
        return cls(name, Channel(keys[:_KEY_BYTES]), Channel(keys[_KEY_BYTES:]))


def draw() -> bytes:
    """Draw name and keys of a new session, for `Session.from_bytes`; send them only over an encrypted connection."""
    return os.urandom(_NAME_BYTES // 2).hex().encode() + os.urandom(2 * _KEY_BYTES)


def _nonce(part: bytes, number: bytes) -> bytes:
    return part + number
