"""Of a Whisper model on the Hugging Face hub, tokenizer and generation's configuration were not fetched."""

import json
from fnmatch import fnmatch

import pytest

from recognition.pretrained import hub_folder

COMMIT = "0" * 40
PUBLISHED = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "pytorch_model.bin",
    "README.md",
    "tokenizer.json",
]


def test_everything_that_is_read_of_a_model_is_fetched_and_no_pickle(tmp_path, monkeypatch):
    library = pytest.importorskip("huggingface_hub", reason="the package huggingface_hub is missing")

    def downloaded(repo_id, revision, allow_patterns, local_files_only=False):
        if local_files_only:
            raise FileNotFoundError("nothing in the cache")
        for name in PUBLISHED:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (tmp_path / name).write_text(json.dumps([repo_id, revision]))
        return str(tmp_path)

    monkeypatch.setattr(library, "snapshot_download", downloaded)
    monkeypatch.setattr(library.constants, "HF_HUB_OFFLINE", False)
    assert hub_folder("someone/whisper", COMMIT) == str(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*PUBLISHED} - {"pytorch_model.bin"})
