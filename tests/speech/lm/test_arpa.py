"""ARPA files: written models are read back, by KenLM too; damage is reported."""

import gzip
import os

import numpy as np
import pytest

from speech.lm import KenlmModel, LmError, arpa, read_arpa, write_arpa

FALLBACK = (0.5, 1.0, 1.5)
SMALL = r"""\data\
ngram 1=4
ngram 2=2

\1-grams:
-0.5	<unk>
-99	<s>	-0.3
-0.4	</s>
-0.25	the	-0.1

\2-grams:
-0.2	<s> the
-0.6	the </s>

\end\
"""


def test_sample_in_the_documentation_is_read(tmp_path):
    sample = "".join(f"{line.strip()}\n" for line in arpa.__doc__.splitlines() if line.startswith("    ") or not line)
    (tmp_path / "lm.arpa").write_text(sample.replace("<tab>", "\t"))
    model = read_arpa(tmp_path / "lm.arpa")
    assert model.tables.counts == (4, 2)
    assert model.sentence(["word"]) == pytest.approx([-0.30103, -0.47712], abs=1e-5)


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("name", ["lm.arpa", "lm.arpa.gz"])
def test_written_model_is_read_back_exactly(make, sentences, tmp_path, order, name):
    model = make(sentences, order, fallback=FALLBACK)
    write_arpa(model, tmp_path / name)
    again = read_arpa(tmp_path / name)
    assert list(again.words) == list(model.words)
    assert again.tables.counts == model.tables.counts
    for field in ("keys", "log_probs", "backoffs", "links"):
        np.testing.assert_array_equal(getattr(again.tables, field), getattr(model.tables, field))
    assert [path.name for path in tmp_path.iterdir()] == [name], "no temporary file stays"


def test_equal_models_give_equal_files(make, sentences, tmp_path, monkeypatch):
    for day, name in enumerate(("a.arpa.gz", "b.arpa.gz")):
        monkeypatch.setattr("time.time", lambda day=day: 1e9 + 86400 * day)
        write_arpa(make(sentences, 2, fallback=FALLBACK), tmp_path / name)
    assert (tmp_path / "a.arpa.gz").read_bytes() == (tmp_path / "b.arpa.gz").read_bytes()


@pytest.mark.parametrize("cutoffs", [(), (0, 0, 1)])
def test_kenlm_gives_the_same_scores(make, sentences, tmp_path, cutoffs):
    model = make(sentences, 3, fallback=FALLBACK, cutoffs=cutoffs)
    write_arpa(model, tmp_path / "lm.arpa")
    kenlm = KenlmModel(tmp_path / "lm.arpa", model.words)
    for sentence in [*sentences[:50], ["w3", "unheard", "w1"], ["w39", "w38", "w37"]]:
        np.testing.assert_allclose(kenlm.sentence(sentence), model.sentence(sentence), atol=1e-5)


def test_small_file_is_read_correctly(tmp_path):
    (tmp_path / "lm.arpa").write_text(SMALL)
    model = read_arpa(tmp_path / "lm.arpa")
    assert model.sentence(["the"]) == pytest.approx([-0.2, -0.6])
    assert model.sentence(["the", "the"]) == pytest.approx([-0.2, -0.1 - 0.25, -0.6])
    assert model.sentence(["what"]) == pytest.approx([-0.3 - 0.5, -0.4])


def test_n_grams_in_any_order_and_without_their_suffixes_are_read(tmp_path):
    """SRILM and IRSTLM prune n-grams that are suffixes of others."""
    text = SMALL.replace("ngram 2=2\n", "ngram 2=2\nngram 3=1\n").replace(
        "\\end", "\\3-grams:\n-0.1\t<s> the the\n\n\\end"
    )
    (tmp_path / "lm.arpa").write_text(
        text.replace("-0.2\t<s> the\n-0.6\tthe </s>", "-0.6\tthe </s>\t0\n-0.2\t<s> the\t-0.7")
    )
    model = read_arpa(tmp_path / "lm.arpa")
    assert model.sentence(["the", "the", "the"]) == pytest.approx([-0.2, -0.1, -0.1 - 0.25, -0.6])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r"\data" + "\\", "nothing", "no ARPA file"),
        ("ngram 1=4", "ngram 1=five", r"line 2: 'ngram 1=…'"),
        ("ngram 1=4", "ngram 1=5", "line 10: 1-grams 1 to 5 were expected"),
        ("ngram 2=2", "ngram 2=99999999999999", "2-grams 1 to 99999999999999 were expected"),
        ("ngram 1=4", "ngram 1=3", r"\\2-grams: was expected"),
        ("-0.25\tthe", "soft\tthe", "soft"),
        ("-0.25\tthe", "nan\tthe", "not finite"),
        ("-0.25\tthe", "-0.4\t</s>", "comes twice"),
        ("-0.6\tthe </s>", "-0.2\t<s> the", "a 2-gram comes twice"),
        ("-0.6\tthe </s>", "-0.6\tthe", "2-grams 1 to 2 were expected"),
        ("-0.6\tthe </s>\n\n\\end\\\n", "", "2-grams 1 to 2 were expected"),
        ("\\end\\\n", "", "the file ends too early"),
    ],
)
def test_errors_in_damaged_files_name_line_and_reason(tmp_path, old, new, message):
    assert old in SMALL
    (tmp_path / "lm.arpa").write_text(SMALL.replace(old, new))
    with pytest.raises(LmError, match=message) as error:
        read_arpa(tmp_path / "lm.arpa")
    assert "lm.arpa" in str(error.value)


def test_n_gram_without_its_context_is_refused(tmp_path):
    text = SMALL.replace("ngram 2=2\n", "ngram 2=2\nngram 3=1\n")
    (tmp_path / "lm.arpa").write_text(text.replace("\\end", "\\3-grams:\n-0.1\tthe the the\n\n\\end"))
    with pytest.raises(LmError, match="'the the the' has no 2-gram as its context"):
        read_arpa(tmp_path / "lm.arpa")


def test_unreadable_files_are_named(tmp_path):
    packed = gzip.compress(SMALL.encode())
    (tmp_path / "cut.arpa.gz").write_bytes(packed[:-20])
    (tmp_path / "plain.arpa.gz").write_text(SMALL)
    (tmp_path / "bytes.arpa").write_bytes(SMALL.encode().replace(b"the", b"th\xff"))
    for name in ("cut.arpa.gz", "plain.arpa.gz", "bytes.arpa", "missing.arpa"):
        with pytest.raises(LmError, match=name):
            read_arpa(tmp_path / name)
    with pytest.raises(LmError, match=r"missing\.arpa"):
        KenlmModel(tmp_path / "missing.arpa", ["the"])


def test_failed_write_keeps_the_old_file(make, sentences, tmp_path, monkeypatch):
    (tmp_path / "lm.arpa").write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_arpa(make(sentences, 2, fallback=FALLBACK), tmp_path / "lm.arpa")
    assert (tmp_path / "lm.arpa").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["lm.arpa"]
