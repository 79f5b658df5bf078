"""Messages about models, versions and aliases that the registry does not have."""

import pytest
from registered import add

from tasks.tracking.fetching import download_bundle
from tasks.tracking.known_models import names_text, versions_of, versions_text


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
