"""Stress marks of phones: ARPAbet's digits (AH0, AH1, AH2) and IPA's signs (ˈə, ˌə)."""

from __future__ import annotations

import re
from typing import Literal

Stress = Literal["keep", "merge", "drop"]
"""`keep` all three levels, `merge` secondary into primary stress, or `drop` the marks."""

_ARPABET = re.compile(r"[A-Z]{1,2}[012]")


def with_stress(phone: str, stress: Stress) -> str:
    """Returns a phone with its stress mark kept, merged or dropped."""
    if stress == "keep":
        return phone
    if _ARPABET.fullmatch(phone):
        return phone[:-1] if stress == "drop" else phone.replace("2", "1")
    return phone.replace("ˈ", "").replace("ˌ", "") if stress == "drop" else phone.replace("ˌ", "ˈ")
