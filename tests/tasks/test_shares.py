"""A share of a source's training utterances: new speech is mixed with some of the old, against forgetting."""

from collections import Counter

import pytest
from support import small_corpus

from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.sets import in_share
from tasks.dataset.tables import read_table
from tasks.stages.base import Run
from tasks.stages.prepare import MANIFEST, PREPARE
from tasks.stages.quarantined import QuarantineError, left_out_lines
from tasks.stages.score import by_group, score_rows
from tasks.stages.shard import SHARD


@pytest.fixture
def corpora(tmp_path):
    """Old and new speech, of other speakers."""
    for name in ("old", "new"):
        table = small_corpus(tmp_path / name, speakers=6, each=5, seconds=0.5 if name == "old" else 0.6)
        head, *rows = table.read_text().splitlines()
        rows = [f"{name}-{row}".replace(",s", f",{name}-s") for row in rows]
        table.write_text("\n".join([head, *rows]) + "\n")
    return tmp_path


def prepared(folder, old=(), seed=1, **data):
    new = {"kind": "table", "path": str(folder / "new"), "set": "train"}
    sources = [new, {"kind": "table", "path": str(folder / "old"), **dict(old)}]
    document = {"name": "mixed", "seed": seed, "data": {"sources": sources, "valid_share": 0.2, **data}}
    document["data"]["duplicates"] = {"fingerprint": False}
    run = Run(parse_config(document), "r")
    return run, PREPARE.execute(run)


def of_corpora(result):
    return Counter((row["corpus"], row["set"]) for row in read_table(result.store, MANIFEST))


@pytest.mark.parametrize("old", [{"set": "train"}, {}])
def test_a_share_of_the_old_speech_is_trained_on_and_the_counts_add_up(home, corpora, old):
    _, whole = prepared(corpora, old)
    _, some = prepared(corpora, {**old, "share": 0.4})
    before, after = of_corpora(whole), of_corpora(some)
    trained, kept = before["old", "train"], after["old", "train"]
    assert 0 < kept < trained
    assert before["new", "train"] == after["new", "train"] == 30
    assert {k: n for k, n in before.items() if k[1] != "train"} == {k: n for k, n in after.items() if k[1] != "train"}
    unused = trained - kept
    assert some.counts == whole.counts | {"written": whole.counts["written"] - unused, "unused": unused}
    assert some.counts["read"] == sum(some.counts[name] for name in ("written", "quarantined", "unused"))
    assert some.record["unused"] == [{"source": 1, "field": "share", "value": 0.4, "utterances": unused}]
    assert left_out_lines(some.record) == [
        f"unused: {unused} training utterances of data.sources.1 are not in its share of 0.4"
    ]
    assert "unused" not in whole.counts
    assert "unused" not in whole.record


def test_the_seed_draws_the_share_and_a_larger_one_contains_it(home, corpora):
    def ids(seed, share):
        _, result = prepared(corpora, {"set": "train", "share": share}, seed=seed, valid_share=0)
        return {row["id"] for row in read_table(result.store, MANIFEST)}

    assert ids(1, 0.3) == ids(1, 0.3) < ids(1, 0.6)
    assert ids(1, 0.3) != ids(2, 0.3)


def test_shares_have_the_size_that_is_asked_for():
    drawn = sum(in_share(f"utterance {number}", 0.25, 7) for number in range(20_000))
    assert drawn == pytest.approx(5000, rel=0.05)
    assert all(in_share(str(number), 1.0, 7) for number in range(100))


def test_a_share_that_leaves_nothing_is_refused(home, corpora):
    with pytest.raises(QuarantineError, match=r"data.sources.1: share 1e-09 leaves none of its utterances: raise it"):
        prepared(corpora, {"set": "train", "share": 1e-9})


def test_folds_have_no_shares(home, corpora):
    with pytest.raises(ConfigError, match=r"leave out sources.share"):
        prepared(corpora, {"share": 0.5}, folds=3)


def test_shards_hold_what_is_used(home, corpora):
    run, result = prepared(corpora, {"set": "train", "share": 0.4})
    shard = SHARD.execute(run)
    assert shard.counts["written"] == result.counts["written"]


def test_word_error_rates_are_counted_by_source():
    def row(corpus, hyp):
        return {"id": f"{corpus} {hyp}", "ref": "a b", "hyp": hyp, "speaker": "", "domain": "", "corpus": corpus}

    rows = [row("old", "a b"), row("new", "a c"), row("old", "a"), row("new", "c c")]
    rates = {
        name: counts["wer"] for name, counts in by_group(score_rows(rows), (row["corpus"] for row in rows)).items()
    }
    assert rates == {"new": 0.75, "old": 0.25}
