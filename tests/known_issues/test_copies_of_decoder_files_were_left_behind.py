"""Threads that fetched a decoder's files at the same time left copies of them in the temporary folder.

Each made a folder of its own; all but one were removed at once, and made again by the copy.
"""

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

from storage.objects import ObjectStore
from tasks.stages import decoder_files


def test_threads_share_one_folder_for_copies(monkeypatch):
    url, original = f"memory://{uuid4().hex}/graph/key", tempfile.TemporaryDirectory
    ObjectStore(url).write("words.txt", b"one")

    def slow(**options):
        time.sleep(0.1)  # until all threads are here
        return original(**options)

    monkeypatch.setattr(decoder_files.tempfile, "TemporaryDirectory", slow)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: decoder_files.local_files(url, "1", {"words": "words.txt"})["words"], range(4)))
    assert len(set(paths)) == 1
    assert Path(paths[0]).read_bytes() == b"one"
