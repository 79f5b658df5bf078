"""Of several tables in a folder, `starling init` took the first one, and did not say that there were others."""

from tasks.dataset.discovery import find_sources


def test_the_other_tables_are_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.wav").touch()
        (tmp_path / f"{name}.csv").write_text(f"path,text\n{name}.wav,word\n")
    corpus = find_sources(tmp_path)
    assert [source.path.name for source in corpus.sources] == ["a.csv"]
    assert corpus.warning == f"left out, since their names stand for no set: {tmp_path / 'b.csv'}"


def test_tables_of_sets_are_all_taken(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.wav").touch()
        (tmp_path / f"{name}.csv").write_text(f"path,text\n{name}.wav,word\n")
    corpus = find_sources(tmp_path)
    assert sorted(source.set for source in corpus.sources) == ["test", "train"]
    assert not corpus.warning
