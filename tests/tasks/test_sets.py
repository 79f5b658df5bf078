from collections import defaultdict

import numpy as np
import pytest

from tasks.config.pipeline import ConfigError, parse_config
from tasks.dataset.sets import assign_sets
from tasks.dataset.splits import SplitError
from tasks.dataset.tables import TableWriter
from tasks.stages.prepare import _SCHEMA


def table(folder, count=240, speakers=24, sets=("",)):
    path = folder / "checked.parquet"
    with TableWriter(path, _SCHEMA) as writer:
        for n in range(count):
            speaker = n % speakers
            row = {"id": f"u{n}", "speaker": f"s{speaker}", "set": sets[n % len(sets)], "text": "x"}
            writer.add(row | {"domain": f"d{speaker % 3}", "duration": 1.0 + speaker + n / 1000})
    return path


def data(**fields):
    sources = [{"kind": "table", "path": "x"}]
    return parse_config({"name": "n", "data": {"sources": sources} | fields}).data


def members(path, used, config, seed=1):
    sets = assign_sets(path, used, config, seed)
    rows = defaultdict(list)
    for n, code in enumerate(sets.codes.tolist()):
        if code >= 0:
            rows[sets.names[code]].append(n)
    return dict(rows)


EVERY = np.ones(240, dtype=bool)


@pytest.mark.parametrize("stratify", [(), ("domain",), ("duration",), ("domain", "duration")])
def test_sets_are_speaker_disjoint_for_any_stratification(tmp_path, stratify):
    sets = members(table(tmp_path), EVERY, data(stratify=stratify, valid_share=0.2, test_share=0.2))
    speakers = {name: {n % 24 for n in rows} for name, rows in sets.items()}
    assert sum(map(len, speakers.values())) == 24
    assert set(speakers) == {"train", "valid", "test"}
    assert sum(map(len, sets.values())) == 240


def test_strata_are_in_every_set(tmp_path):
    path = table(tmp_path, count=2400, speakers=240)
    for column in ("domain", "speaker"):
        by = "utterance" if column == "speaker" else "speaker"
        sets = members(path, np.ones(2400, dtype=bool), data(stratify=(column,), split_by=by))
        for name in ("valid", "test"):
            assert len(sets[name]) == pytest.approx(240, abs=60)
        domains = np.bincount([n % 240 % 3 for n in sets["test"]])
        assert domains.min() >= 40


def test_unused_rows_have_no_set_and_do_not_affect_others(tmp_path):
    path, used = table(tmp_path), EVERY.copy()
    used[::7] = False
    sets = members(path, used, data())
    assert sorted(row for rows in sets.values() for row in rows) == np.flatnonzero(used).tolist()


def test_folds_are_speaker_disjoint_and_keep_named_sets(tmp_path):
    path = table(tmp_path, sets=("", "train", "eval"))
    sets = members(path, EVERY, data(folds=4))
    assert set(sets) == {"fold-1", "fold-2", "fold-3", "fold-4", "valid", "eval"}
    assert sets["eval"] == [n for n in range(240) if n % 3 == 2]
    speakers = [{n % 24 for n in sets[name]} for name in sets if name != "eval"]
    assert sum(map(len, speakers)) == len(set.union(*speakers))
    assert members(path, EVERY, data(folds=4, fold=2)) == sets


def test_unknown_column_and_impossible_folds_are_named(tmp_path):
    with pytest.raises(SplitError, match="no 'accent', but id, set"):
        assign_sets(table(tmp_path), EVERY, data(stratify=("accent",)), 1)
    with pytest.raises(ConfigError, match="needs split_by: utterance"):
        data(stratify=("speaker",))
    for wrong in ({"folds": 1}, {"folds": 3, "fold": 4}, {"fold": 1}):
        with pytest.raises(ConfigError, match="2 folds or more"):
            data(**wrong)


def test_too_few_speakers_for_folds_are_refused_with_a_remedy(tmp_path):
    path = table(tmp_path, speakers=4)
    with pytest.raises(
        SplitError, match="4 speakers are too few for 4 folds and a validation set: give a source `set:"
    ):
        assign_sets(path, EVERY, data(folds=4), 1)
    assert {"fold-3", "valid"} < set(members(path, EVERY, data(folds=3)))
    assert set(members(path, EVERY, data(folds=4, valid_share=0))) == {f"fold-{n}" for n in (1, 2, 3, 4)}
    named = members(table(tmp_path, speakers=5, sets=("", "", "", "", "valid")), EVERY, data(folds=4))
    assert "valid" in named
    assert "fold-4" in named
