"""What the addresses of stages depend on: every field that affects an output, and no field with its default.

After raising a stage's version, `python tests/tasks/test_addresses.py` records the defaults.
"""

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import soundfile

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[number]) for number in (2, 1)]

from forks import Forkable
from support import ROOT, load_beside, tiny_bundle

from configurable.choices import choice_of
from speech.synthesis import corpus as synthesis
from tasks import STAGES
from tasks.stages.base import get_stage

fields = load_beside(__file__, "addresses.py")
FILE = Path(__file__).with_name("address_defaults.json")
_RUNS_ONLY = (
    *("threads", "loader_threads", "loader_processes", "max_unreadable", "machines_per_node", "learner_metrics"),
    *("compile", "cuda_graphs", "flat_bf16"),
    *("checkpoint_steps", "checkpoint_keep", "log_steps", "launch", "membership", "strategy.newcomer"),
    *("exchange.kind", "exchange.encrypt", "exchange.timeout_s", "exchange.chunk_kb", "exchange.daemons"),
)
WITHOUT_EFFECT = {
    *(
        "runner",
        "slots",
        "search",
        "monitor",
        "storage.url",
        "storage.workers",
        "storage.credentials",
        "storage.cache_gb",
    ),
    *("data.fold", "data.sources.0.licence", "align.device"),
    *(f"{section}.{name}" for section in ("train", "lm_train") for name in _RUNS_ONLY),
    "train.objective.alignments",  # their digest counts
    "train.objective.joint_mb",
    "model.revision",
    *("register_as.promote", "register_as.accept_untrained", "register_as.first_max_wer"),
}
"""Fields that change no output, and parts of which no field does."""
ELSEWHERE = {
    "data.folds": "is not valid alone: tests/tasks/test_folds.py",
    "decode.hmm": "is not valid alone: tests/tasks/test_graph_stage.py",
    "model.source": "names a pretrained model, whose digest counts: tests/tasks/test_pretrained_training.py",
    "train.init": "names a model, whose digest counts: tests/tasks/test_warm_starts.py",
    "restore": "needs a pretrained model: tests/tasks/test_restore.py",
    "restore.most_errors": "likewise",
    "realign.model": "names a model, whose digest counts: tests/tasks/test_realign.py",
}
"""Fields that are not varied here."""
READERS = {
    "data": {"prepare"},
    "data.fold": set(),
    "data.normalizer": {"prepare", "align", "train", "lm", "rescoring"},
    "data.speeds": {"shard"},
    "data.lone_copies": {"shard"},
    "data.pauses": {"shard"},
    "data.sample_rate": {"prepare", "shard"},
    "data.max_quarantined": {"prepare", "shard"},
    "storage.shard_seconds": {"shard"},
    "seed": {"prepare", "shard", "train", "score"},
    "features": {"features", "train"},
    "tokens": {"train"},
    "model": {"train"},
    **{f"model.{name}": {"register"} for name in ("licence", "trained_on")},
    "train": {"train"},
    "recognizer": {"train"},
    "align": {"align"},
    "align.recognize": {"decode"},
    "align.recognize.arpa": {"graph"},
    "realign": {"realign"},
    "lexicon": {"align", "lm"},
    "lm": {"lm"},
    "lm_train": {"lm"},
    "rescoring": {"rescoring"},
    "decode": {"decode", "register"},
    "tune": {"decode"},
    "score.sets": {"decode"},
    "register_as": {"register"},
    "report": {"report"},
}
"""Stages that read a part, at least; the longest path counts."""


WITH_FIELD = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "Importer"]
runpy.run_path(sys.argv[3], run_name="__main__")
"""
"""Runs `addresses.py`. A fork has libraries, and this lets it define our own classes again, with one more field."""


def named_files(folder):
    """A model, and a file for each field that names one: a recording."""
    tiny_bundle(folder / "bundle")
    soundfile.write(folder / "named.wav", np.zeros(800), 8000)
    return folder / "bundle", folder / "named.wav"


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    return named_files(tmp_path_factory.mktemp("named"))


def effects_of(bundle, file):
    """For each path and field: the stages whose address another value changes, and the field's default."""
    stages_of = defaultdict(set)
    defaults = {}
    for config, place in fields.configurations(bundle, file):
        known = {}
        for variation in fields.variations(config, place, file):
            if variation.path in ELSEWHERE:
                continue
            # the configuration is kept: another object could get its id
            _, before = known.setdefault(id(variation.before), (variation.before, None))
            before = before or fields.addresses(variation.before)
            known[id(variation.before)] = (variation.before, before)
            after = fields.addresses(variation.after)
            stages_of[variation.path, variation.field] |= {
                name for name in after.keys() & before.keys() if after[name] != before[name]
            }
            defaults[variation.field] = variation.default
    return dict(stages_of), defaults


@pytest.fixture(scope="module")
def effects(named):
    with pytest.MonkeyPatch.context() as patch:
        fields.replace_inputs(patch.setattr)
        return effects_of(*named)


def below(path, parts):
    """The longest of some parts of a configuration that a path is in."""
    return max((part for part in parts if f"{path}.".startswith(f"{part}.")), key=len, default="")


def test_every_field_changes_the_address_of_each_stage_that_reads_it(effects):
    stages_of, _ = effects
    assert len(stages_of) > 500
    wrong = {
        f"{path} ({field})": sorted(READERS[below(path, READERS)] - stages)
        for (path, field), stages in stages_of.items()
        if not below(path, WITHOUT_EFFECT) and path.count(".") and not READERS[below(path, READERS)] <= stages
    }
    assert not wrong, "their addresses miss these fields, or READERS is wrong"


def test_fields_without_effect_change_no_address_and_no_others_are_so(effects):
    stages_of, _ = effects
    without = {path for path, _ in stages_of if below(path, WITHOUT_EFFECT)}
    assert {path for (path, _), stages in stages_of.items() if not stages} == without
    assert {below(path, WITHOUT_EFFECT) for path in without} == WITHOUT_EFFECT


def test_a_field_added_to_every_configuration_changes_no_address(named, monkeypatch):
    fields.replace_inputs(monkeypatch.setattr)
    command = [sys.executable, "-c", Forkable(WITH_FIELD), *map(str, named), fields.__file__]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with_field, without = json.loads(done.stdout), fields.of_all_kinds(*named)
    assert len(without) > 50
    moved = {label: [name for name in of if of[name] != with_field[label][name]] for label, of in without.items()}
    assert {label: names for label, names in moved.items() if names} == {}


def test_configurations_of_one_field_can_be_told_apart():
    def alternatives(model, seen):
        for name, field in model.model_fields.items():
            choice = choice_of(field)
            classes = list(choice.kinds.values()) if choice else list(fields.classes(field.annotation))
            if not choice and len(classes) > 1:
                yield f"{model.__name__}.{name}"
            for kind in {*classes} - seen:
                seen.add(kind)
                yield from alternatives(kind, seen)

    assert list(alternatives(fields.PipelineConfig, set())) == [], "use OneOf: an address needs the kind"


def recorded_now(stages_of, defaults):
    """Version and defaults of each stage; without those of sections, which are addressed by themselves."""
    versions = {name: get_stage(name).version for name in STAGES} | {fields.SYNTHESIS: synthesis._VERSION}
    of = {name: {"version": version, "defaults": {}} for name, version in versions.items()}
    for (_, field), stages in stages_of.items():
        for name in stages:
            if not field.startswith("PipelineConfig."):
                of[name]["defaults"][field] = defaults[field]
    return of


def changed(recorded, present, place=""):
    """Fields whose default differs from the recorded one; new fields and those that are gone do not count."""
    if isinstance(recorded, dict) and isinstance(present, dict):
        both = [name for name in recorded if name in present]
        return [difference for name in both for difference in changed(recorded[name], present[name], f"{place}.{name}")]
    return [] if recorded == present else [place.removeprefix(".")]


def test_no_default_has_changed_without_a_new_version(effects):
    recorded, present = json.loads(FILE.read_text()), recorded_now(*effects)
    versions = {name: stage["version"] for name, stage in present.items()}
    assert {name: stage["version"] for name, stage in recorded.items()} == versions, "record the defaults, see above"
    differences = {name: changed(recorded[name]["defaults"], stage["defaults"]) for name, stage in present.items()}
    assert {name: names for name, names in differences.items() if names} == {}, "raise the versions of these stages"


def test_changed_defaults_are_found_but_new_and_removed_fields_ignored():
    recorded = {"a": {"b": 1, "c": None}, "d": 2}
    assert changed(recorded, {"a": {"b": 1, "c": None, "new": 5}, "d": 2}) == []
    assert changed(recorded, {"a": {"b": 2, "c": None}, "d": 3}) == ["a.b", "d"]
    assert changed(recorded, {"a": {"b": 1, "c": 0}}) == ["a.c"]


if __name__ == "__main__":
    fields.replace_inputs(setattr)
    with tempfile.TemporaryDirectory() as folder:
        present = recorded_now(*effects_of(*named_files(Path(folder))))
    FILE.write_text(json.dumps(present, indent=1, sort_keys=True) + "\n")
