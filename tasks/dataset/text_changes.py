"""Table of the changes that normalization made to the transcripts of a prepared corpus; the changes can be undone."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from speech.scripts import LanguageError
from speech.text import TextNormalizer
from speech.text_log import TextChange, count_kinds, text_changes
from storage.objects import ObjectStore
from tasks.config.data import DataConfig
from tasks.config.pipeline import ConfigError
from tasks.dataset.tables import Row, TableWriter, batches, iter_table

TEXT_CHANGES = "text-changes.parquet"
TEXT_CHANGES_SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "language", "changes")])
_EXAMPLES = 2
_SHOWN = 60


def check_languages(data: DataConfig) -> None:
    """Check that the normalizer supports its options in each source's language.

    Raises:
        ConfigError: If it does not. Utterances with an unsupported language of their own are quarantined instead.
    """
    normalizer = TextNormalizer(data.normalizer)
    for number, source in enumerate(data.sources):
        try:
            normalizer.normalize("1", source.language)
        except LanguageError as error:
            raise ConfigError(
                f"data.sources.{number} (language {source.language!r}): {error}, or correct the source's language"
            ) from error


class _Count:
    """Counts and examples of one language."""

    def __init__(self) -> None:
        self.utterances = self.changed = 0
        self.kinds: Counter[str] = Counter()
        self.examples: dict[str, list[dict[str, str]]] = {}

    def add(self, row: Row, changes: Sequence[TextChange]) -> None:
        self.changed += 1
        kinds = count_kinds(changes)
        self.kinds += kinds
        for kind in kinds:
            self._show(kind, row["id"], next(change for change in changes if change.kind == kind))

    def _show(self, kind: str, name: str, change: TextChange) -> None:
        shown = self.examples.setdefault(kind, [])
        example = {"id": name, "was": _shorten(change.was), "became": _shorten(change.became)}
        new = all(example["was"] != other["was"] for other in shown)
        if len(shown) < _EXAMPLES and new:
            shown.append(example)

    def to_dict(self) -> dict[str, Any]:
        return {
            "utterances": self.utterances,
            "changed": self.changed,
            "kinds": dict(self.kinds.most_common()),
            "examples": self.examples,
        }


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def write_text_changes(manifest: Path, target: Path) -> dict[str, Any]:
    """Write the changes of every utterance whose transcript was changed by normalization.

    Args:
        manifest: Local file with the columns `id`, `language`, `raw_text` and `text`.
        target: Local file of the table: `id`, `language`, and `changes`, a JSON list of [start, was, became].

    Returns:
        By language: `utterances`, `changed`, `kinds` (changes by kind) and `examples`, for the stage's record.
    """
    languages: dict[str, _Count] = {}
    with TableWriter(target, TEXT_CHANGES_SCHEMA) as table:
        for batch in batches(manifest, ["id", "language", "raw_text", "text"]):
            for row in batch.to_pylist():
                count = languages.setdefault(row["language"], _Count())
                count.utterances += 1
                if changes := text_changes(row["raw_text"], row["text"]):
                    count.add(row, changes)
                    lists = json.dumps([change.to_list() for change in changes], ensure_ascii=False)
                    table.add({"id": row["id"], "language": row["language"], "changes": lists})
    return {language: languages[language].to_dict() for language in sorted(languages)}


def read_text_changes(store: ObjectStore, folder: Path) -> dict[str, list[TextChange]]:
    """The changes of all changed utterances, by id.

    Args:
        store: The prepare stage's output.
        folder: Local folder for a copy if the store is remote; the caller removes it.
    """
    rows = iter_table(store, TEXT_CHANGES, folder)
    return {row["id"]: [TextChange(*change) for change in json.loads(row["changes"])] for row in rows}
