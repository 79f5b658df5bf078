"""KenLM's `lmplz`, where it is installed: the same models as our own estimation, in less time."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from speech.lm.base import LmError
from speech.lm.sources import Block, Text


def lmplz_path() -> str | None:
    """Where `lmplz` is: what the environment variable LMPLZ names, else what is on the PATH."""
    return os.environ.get("LMPLZ") or shutil.which("lmplz")


def find_lmplz() -> str:
    """Returns the path of `lmplz`.

    Raises:
        LmError: It is not installed.
    """
    if (tool := lmplz_path()) is None:
        raise LmError("lm.lmplz: there is no lmplz on the PATH: install KenLM, or set lm.lmplz: false")
    return tool


def run_lmplz(
    text: Text,
    scratch: Path,
    order: int,
    cutoffs: Sequence[int] = (),
    vocabulary: int | None = None,
    fallback: Sequence[float] | None = None,
) -> tuple[Path, Counter[str]]:
    """Estimates an ARPA file in a scratch folder; returns its path, and the counts of the text.

    Raises:
        LmError: There is no `lmplz`, or it fails; the message ends with its own.
    """
    tool = find_lmplz()
    source, target = scratch / "text.txt", scratch / "lmplz.arpa"
    counts, words = _write_text(text, source, vocabulary is not None)
    command = [tool, "-o", str(order), "-S", "40%", "-T", str(scratch), "--text", str(source), "--arpa", str(target)]
    if cutoffs:
        command += ["--prune", *map(str, cutoffs)]
    if fallback is not None:
        command += ["--discount_fallback", *map(str, fallback)]
    if vocabulary is not None:
        limit = scratch / "vocabulary.txt"
        limit.write_text("\n".join(_most_frequent(words, vocabulary)), encoding="utf-8")
        command += ["--limit_vocab_file", str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch))
        raise LmError(f"lmplz failed: {done.stderr.strip()[-1000:]}")
    return target, counts


def _write_text(text: Text, path: Path, count_words: bool) -> tuple[Counter[str], Counter[str]]:
    counts, words = Counter[str](), Counter[str]()
    with path.open("w", encoding="utf-8") as file:
        for block in text.blocks():
            counts += block.counts
            file.writelines(f"{line}\n" for line in block.lines)
            if count_words:
                words.update(_words(block))
    if not counts["kept"]:
        raise LmError(f"there is no text for a language model: {dict(counts)}; name text in lm.text.paths")
    return counts, words


def _words(block: Block) -> Iterator[str]:
    return (word for line in block.lines for word in line.split())


def _most_frequent(words: Counter[str], limit: int) -> list[str]:
    # Counter.most_common keeps the order of first appearance among equally frequent words, as our own limit does.
    return [word for word, _ in words.most_common(limit)]
