"""Maps eSpeak NG's English phonemes (IPA) to CMUdict's phones (ARPAbet)."""

from __future__ import annotations

from collections.abc import Sequence

_VOWELS = {
    **dict.fromkeys(("iː", "i"), "IY"),
    **dict.fromkeys(("ɪ", "ᵻ"), "IH"),
    **dict.fromkeys(("ɛ", "e"), "EH"),
    **dict.fromkeys(("æ", "a"), "AE"),
    **dict.fromkeys(("ɑː", "ɑ", "ɒ", "aː"), "AA"),
    **dict.fromkeys(("ɔː", "ɔ", "oː"), "AO"),
    **dict.fromkeys(("oʊ", "əʊ", "o"), "OW"),
    **dict.fromkeys(("uː", "u"), "UW"),
    **dict.fromkeys(("ʌ", "ɐ", "ə"), "AH"),
    **dict.fromkeys(("ɜː", "ɜ", "ɚ", "ɝ"), "ER"),
    **{"ʊ": "UH", "eɪ": "EY", "aɪ": "AY", "aʊ": "AW", "ɔɪ": "OY"},
}
_CONSONANTS = {
    **{sound: sound.upper() for sound in "pbtdkfvszmnlrw"},
    **{"ɡ": "G", "g": "G", "tʃ": "CH", "dʒ": "JH", "θ": "TH", "ð": "DH", "ʃ": "SH", "ʒ": "ZH", "h": "HH", "ŋ": "NG"},
    **{"ɹ": "R", "j": "Y", "ɾ": "T", "ʔ": "T", "x": "K", "ɫ": "L", "ɬ": "L", "ʍ": "W"},
}
_SEVERAL = {
    **{f"{vowel}ɹ": f"{phone} R" for vowel, phone in _VOWELS.items() if phone != "ER"},
    **{"aɪɚ": "AY ER", "aɪə": "AY AH", "aʊɚ": "AW ER", "iə": "IY AH", "ɪə": "IH AH", "əl": "AH L", "n̩": "AH N"},
    **{"l̩": "AH L", "m̩": "AH M"},
}
_TABLE = _SEVERAL | _CONSONANTS | _VOWELS
_VOWEL_PHONES = set(_VOWELS.values())


def from_ipa(phones: Sequence[str], *, digits: bool = True) -> tuple[str, ...] | None:
    """Returns the ARPAbet phones of English phonemes; None if one of them has no counterpart.

    Args:
        phones: Phonemes of eSpeak NG, with stress marks.
        digits: Whether vowels get CMUdict's stress digits.
    """
    converted: list[str] = []
    for phone in phones:
        level = "1" if phone.startswith("ˈ") else "2" if phone.startswith("ˌ") else "0"
        plain = _TABLE.get(phone.lstrip("ˈˌ"))
        if plain is None:
            return None
        for part in plain.split():
            converted.append(part + level if digits and part in _VOWEL_PHONES else part)
            level = "0" if part in _VOWEL_PHONES else level
    return tuple(converted)
