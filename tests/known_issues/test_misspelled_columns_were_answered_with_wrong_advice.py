"""For `columns: {text: labell}`, the advice was to rename the table's right column; `init` named no similar column."""

import pytest
from support import write_config, write_tone

from storage.corpora import CorpusError, open_corpus
from tasks.dataset.discovery import find_sources


def table(folder, header):
    write_tone(folder / "a.wav", seconds=0.3)
    (folder / "digits.csv").write_text(f"{header}\na.wav,one,anna\n")
    return folder / "digits.csv"


def test_misspelled_column_of_a_configuration_is_answered_with_the_right_one(tmp_path, home, invoke):
    path = table(tmp_path, "filename,label,user")
    columns = {"audio": "filename", "text": "labell"}
    source = {"kind": "table", "path": str(path), "options": {"columns": columns}}
    config = write_config(tmp_path / "c.yaml", {"name": "c", "data": {"sources": [source]}})
    shown = invoke("config", "check", config, code=1)
    expected = f"'labell' is not a column of {path}; did you mean 'label'?"
    assert f"data.sources.0: options.columns.text: {expected}" in shown.stdout + shown.stderr
    with pytest.raises(CorpusError, match="'words' is not a column of .*, which has only filename, label, user$"):
        list(open_corpus("table", str(path), columns=columns | {"text": "words"}))
    with pytest.raises(CorpusError, match=r"no column 'usr' to select by; did you mean 'user'\?$"):
        list(open_corpus("table", str(path), columns=columns | {"text": "label"}, where={"usr": "anna"}))


def test_misspelled_column_of_a_table_is_answered_with_the_name_meant(tmp_path):
    path = table(tmp_path, "filename,labell,user")
    with pytest.raises(CorpusError) as caught:
        find_sources(path)
    assert str(caught.value) == (
        "digits.csv has the columns filename, labell, user, and none has a name for transcripts (text, sentence, "
        "transcript, transcription, label, words, utterance, prompt, normalized_text, raw_text, content, reference): "
        "rename the one with the transcripts, or name it in `starling init --column text=NAME`; "
        "'labell': did you mean 'label'?"
    )
    path = table(tmp_path, "path,transcritp,speaker")
    with pytest.raises(CorpusError, match=r"no column for text .*; 'transcritp': did you mean 'transcript'\?$"):
        list(open_corpus("table", str(path)))
