"""An export into a link, a mount or the working folder failed after all files had been written, naming a hidden folder.

Folders may be empty and exist, but they were replaced by a new one, which the system refuses for a link or a mount; in
the working folder, the hidden one itself was in the way.
"""

import json
from pathlib import Path

import pytest

from recognition.export import export_bundle

pytest.importorskip("onnxruntime")


@pytest.fixture
def target(request, tmp_path, monkeypatch):
    """Folder to give, and where the files belong."""
    place = tmp_path / "out" / "place"
    place.mkdir(parents=True)
    if request.param == "working folder":
        monkeypatch.chdir(place)
        return Path(), place
    link = tmp_path / "out" / "link"
    link.symlink_to(place)
    if request.param == "link to nothing":
        place.rmdir()
    return link, place


@pytest.mark.parametrize("target", ["link", "link to nothing", "working folder"], indirect=True)
def test_a_model_is_exported_where_a_link_or_the_working_folder_is(bundle, target):
    given, place = target
    before = place.stat().st_ino if place.exists() else None
    described = export_bundle(bundle, given, int8=False)
    assert before in (None, place.stat().st_ino)
    assert json.loads((place / "model.json").read_text()) == described
    assert set(described["files"]) < {path.name for path in place.iterdir()}
    assert [path.name for path in place.parent.iterdir() if path.name.startswith(".")] == []


def test_a_target_in_a_file_is_refused_with_a_remedy(bundle, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"file/model cannot be made \(.*\): name another folder with --to"):
        export_bundle(bundle, tmp_path / "file" / "model", int8=False)
    assert (tmp_path / "file").read_text() == "mine"
