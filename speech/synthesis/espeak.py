"""Reproducible speech synthesis and phonemes with eSpeak NG through ctypes.

The library and its data come with the wheel `espeakng-loader`, which is licensed under the GPL and therefore in the
extra `espeak`, not in the core. The library keeps the phases of its oscillators and the state of its noise in static
variables, so its output depends on everything synthesized before. Each `Engine` therefore reloads it, which takes a few
milliseconds: the same sequence of utterances from one engine gives the same samples (except for a few whispering
variants such as "caleb" and "Reed", which use another source of noise).
"""

from __future__ import annotations

import _ctypes
import ctypes
import re
import sys
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configurable.extras import install_remedy

_SYNCHRONOUS, _DONT_EXIT = 2, 0x8000
_RATE, _PITCH, _RANGE = 1, 3, 4
_CHARACTERS_UTF8 = 1
_IPA = 2
_LANGUAGE_SWITCH = re.compile(r"\([a-z-]+\)")  # "(en)" before an English word in another language
_NOISE_SEED = 1
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)

_library_lock = threading.Lock()  # the library has a single state per process
_owner: list[int] = []  # the thread that holds the lock: a nested engine would deadlock


class SynthesizerMissingError(ImportError):
    """eSpeak NG is not installed or cannot be loaded."""


class VoiceError(ValueError):
    """An unknown voice, a property out of range, or a text that cannot be spoken."""


@dataclass(frozen=True)
class Voice:
    """A voice of eSpeak NG.

    Attributes:
        variant: the speaker, such as "f3" or "m1" (see `list_variants`); "" is the default voice.
        language: language and accent.
        rate: words per minute, 80 to 450.
        pitch: 0 to 99.
        pitch_range: 0 (monotone) to 99.
    """

    variant: str = ""
    language: str = "en-us"
    rate: int = 175
    pitch: int = 50
    pitch_range: int = 50

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("rate", self.rate, 80, 450),
            ("pitch", self.pitch, 0, 99),
            ("pitch_range", self.pitch_range, 0, 99),
        ):
            if not low <= value <= high:
                raise VoiceError(f"voice {self.name}: {name} {value} is not between {low} and {high}")

    @property
    def name(self) -> str:
        """The voice's name in eSpeak NG, such as "en-us+f3"."""
        return f"{self.language}+{self.variant}" if self.variant else self.language


def _paths() -> tuple[str, str]:
    """The library and its data folder."""
    try:
        import espeakng_loader  # optional dependency (GPL)
    except ImportError as error:
        raise SynthesizerMissingError(
            f"eSpeak NG is not installed (it is licensed under the GPL, so it is an extra): {install_remedy('espeak')}"
        ) from error
    return str(espeakng_loader.get_library_path()), str(espeakng_loader.get_data_path())


@lru_cache(maxsize=1)
def list_variants() -> tuple[str, ...]:
    """Names of the voice variants, sorted.

    Raises:
        SynthesizerMissingError: eSpeak NG is not installed.
    """
    return tuple(sorted(path.name for path in Path(_paths()[1], "voices", "!v").iterdir()))


class Engine:
    """A newly loaded eSpeak NG, used as a context manager; only one per process at a time, others wait.

    Attributes:
        sample_rate: in Hz (22,050).
        version: version of eSpeak NG.

    Raises:
        SynthesizerMissingError: eSpeak NG is not installed or cannot be loaded.

    Example:
        >>> with Engine() as engine:
        ...     samples = engine.speak("turn the lights on", Voice("f3"))
    """

    sample_rate: int
    version: str

    def __init__(self) -> None:
        self._library: Any = None
        self._chunks: list[bytes] = []
        self._language = ""
        self._callback = _CALLBACK(self._receive)  # keeps the callback alive: the library only has its address

    def __enter__(self) -> Engine:
        library_path, data_path = _paths()
        if threading.get_ident() in _owner:
            raise RuntimeError("this thread has an engine already: speak with that one, or close it first")
        _library_lock.acquire()
        _owner.append(threading.get_ident())
        try:
            self._library = ctypes.CDLL(library_path)
            self.sample_rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data_path.encode(), _DONT_EXIT)
            if self.sample_rate <= 0:
                raise OSError(f"it does not accept its data folder {data_path!r}")
            self._library.espeak_Info.restype = ctypes.c_char_p
            self.version = self._library.espeak_Info(None).decode()
            self._library.espeak_SetSynthCallback(self._callback)
            self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
            if hasattr(self._library, "espeak_ng_SetRandSeed"):
                self._library.espeak_ng_SetRandSeed(ctypes.c_long(_NOISE_SEED))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | AttributeError):
                raise SynthesizerMissingError(f"eSpeak NG does not load: {error}") from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unload the library, which discards its state, and release it for the next engine."""
        library, self._library = self._library, None
        try:
            if library is not None:
                library.espeak_Terminate()
                if sys.platform != "win32":
                    _ctypes.dlclose(library._handle)
        finally:
            _owner.clear()
            _library_lock.release()

    def _receive(self, samples: int | None, count: int, events: int | None) -> int:
        if samples and count > 0:
            self._chunks.append(ctypes.string_at(samples, count * 2))
        return 0

    def speak(self, text: str, voice: Voice | None = None) -> NDArray[np.int16]:
        """Synthesize a text.

        Args:
            text: plain text.
            voice: the voice; the default American voice if None.

        Returns:
            int16 `[num_samples]` at `sample_rate`.

        Raises:
            VoiceError: the voice is unknown, or the text is empty or contains control characters.
        """
        voice = voice or Voice()
        # Control characters are commands to eSpeak NG, and NUL ends the text.
        if not text.strip() or any(ord(character) < 32 for character in text):
            raise VoiceError(f"cannot speak {text!r}: need a text without control characters")
        self._choose(voice)
        self._chunks.clear()
        data = text.encode()
        status = self._library.espeak_Synth(data, len(data) + 1, 0, 1, 0, _CHARACTERS_UTF8, None, None)
        if status != 0:
            raise VoiceError(f"eSpeak NG cannot speak {text!r} as {voice.name} (status {status})")
        self._library.espeak_Synchronize()
        return np.frombuffer(b"".join(self._chunks), dtype=np.int16)

    def phonemes(self, text: str, language: str = "en-us") -> tuple[str, ...]:
        """The phonemes of a text in IPA; a vowel's stress mark stands before it.

        Args:
            text: plain text; none gives none.
            language: one of eSpeak NG's.

        Raises:
            VoiceError: the language is unknown, or the text contains control characters.
        """
        if any(ord(character) < 32 for character in text):
            raise VoiceError(f"cannot pronounce {text!r}: need a text without control characters")
        if language != self._language:
            self._choose(Voice(language=language))
            self._language = language
        rest = ctypes.c_char_p(text.encode())
        phones: list[str] = []
        while rest.value:  # it takes a clause at a time
            phonemes = self._library.espeak_TextToPhonemes(ctypes.byref(rest), _CHARACTERS_UTF8, _IPA | ord("_") << 8)
            spoken = _LANGUAGE_SWITCH.sub("", (phonemes or b"").decode())
            phones += [phone for word in spoken.split() for phone in word.split("_") if phone]
        return tuple(phones)

    def _choose(self, voice: Voice) -> None:
        if self._library is None:
            raise RuntimeError("this engine is not open: use it in a with statement")
        self._language = ""
        # An unknown variant would be ignored silently.
        if voice.variant and voice.variant not in list_variants():
            raise VoiceError(f"unknown voice variant {voice.variant!r}: choose one of {', '.join(list_variants())}")
        if self._library.espeak_SetVoiceByName(voice.name.encode()) != 0:
            raise VoiceError(f"eSpeak NG has no voice {voice.name!r}: choose another language")
        for parameter, value in ((_RATE, voice.rate), (_PITCH, voice.pitch), (_RANGE, voice.pitch_range)):
            self._library.espeak_SetParameter(parameter, value, 0)


def speak(text: str, voice: Voice | None = None) -> tuple[NDArray[np.int16], int]:
    """Synthesize one text with a new engine; arguments and errors as in `Engine.speak`.

    Returns:
        int16 `[num_samples]` and the sample rate in Hz.
    """
    with Engine() as engine:
        return engine.speak(text, voice), engine.sample_rate
