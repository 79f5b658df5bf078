"""Synthetic speech for demonstrations and tests: spoken commands by eSpeak NG, without downloads."""

from speech.synthesis.commands import VOCABULARY, random_command, spell_number
from speech.synthesis.corpus import SynthesisConfig, synthesize_corpus
from speech.synthesis.espeak import Engine, SynthesizerMissingError, Voice, list_variants, speak

__all__ = [
    "VOCABULARY",
    "Engine",
    "SynthesisConfig",
    "SynthesizerMissingError",
    "Voice",
    "list_variants",
    "random_command",
    "speak",
    "spell_number",
    "synthesize_corpus",
]
