"""A corpus without permission to read it "has no known corpus layout"; the system's reason was dropped."""

import pytest

from storage.corpora import CorpusError, guess_kind
from storage.corpora.sidecar import SidecarReader


def test_the_systems_reason_is_told(tmp_path, monkeypatch):
    def forbidden(root):
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr(SidecarReader, "recognises", forbidden)
    with pytest.raises(CorpusError, match=rf"{tmp_path} cannot be read \(Permission denied\)"):
        guess_kind(str(tmp_path))
