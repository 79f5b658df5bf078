"""Transcripts in a model's written form, by row of a set's index; the stage `restore` makes them."""

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.intact import damaged, readable
from storage.objects import ObjectStore

SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string())])
"""A row for each utterance of the set; the text is null where there is none."""


def read_written_texts(store: ObjectStore, name: str, utterances: int) -> Any:
    """The texts of the set `train` or `valid`: an Arrow array, null where the transcript is to be used.

    Args:
        store: Output of the stage `restore`.
        name: The set.
        utterances: How many the set has.

    Raises:
        DamagedObjectError: The file is damaged, or of another set.
    """
    path = store.join(f"{name}.parquet")
    data = store.read(f"{name}.parquet")
    with readable(path):
        column = pq.read_table(io.BytesIO(data), columns=["text"], page_checksum_verification=True)["text"]
    if len(column) != utterances:
        raise damaged(path, f"it has {len(column)} texts of {utterances} utterances")
    return column
