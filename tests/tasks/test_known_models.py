"""Messages about models, versions and aliases that the registry does not have."""

import pytest
from registered import add

from tasks.tracking.fetching import download_bundle
from tasks.tracking.known_models import names_text, versions_of, versions_text
from tasks.tracking.runs import experiment_id


def test_versions_with_aliases_come_first_and_long_lists_are_shortened(api):
    add(api, count=13)
    api.set_registered_model_alias("m", "champion", "4")
    assert versions_of(api, "m")["13"] == ["@challenger"]
    shown = versions_text(versions_of(api, "m"))
    assert shown == "13 (@challenger), 4 (@champion), 12, 11, 10, 9, 8, 7, 6, 5 and 3 more"
    assert names_text([]) == "none"


@pytest.mark.parametrize("unknown", ["m@nosuch", "m/99"])
def test_unknown_alias_or_version_names_those_that_there_are(api, unknown):
    add(api, count=2)
    with pytest.raises(ValueError, match=r"'m' has the versions 2 \(@challenger\), 1: give one of these or its alias"):
        download_bundle(f"models:/{unknown}")


def test_unknown_model_names_the_registered_ones(api):
    for name in ("a", "b"):
        add(api, name)
    with pytest.raises(ValueError, match="it has the models 'a', 'b': give one of them"):
        download_bundle("models:/c@champion")


@pytest.mark.parametrize("known", ["m@challenger", "m/1"])
def test_version_whose_files_are_gone_is_said_to_be_in_the_registry(api, known):
    add(api)
    with pytest.raises(ValueError, match=rf"{known} is in the registry at .*, but its files at .* cannot be read"):
        download_bundle(f"models:/{known}")


def test_model_of_another_program_is_refused(api, tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")
    api.create_registered_model("other")
    api.create_model_version("other", source=str(tmp_path), run_id=api.create_run(experiment_id(api, "e")).info.run_id)
    with pytest.raises(ValueError, match=r"models:/other/1 was not made by Starling: it has no bundle.json"):
        download_bundle("models:/other/1")
