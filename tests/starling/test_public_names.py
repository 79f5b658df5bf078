"""The public names are imported when they are used."""

import pytest

import starling


def test_every_public_name_exists_and_others_do_not():
    assert all(getattr(starling, name) is not None for name in starling.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = starling.nothing
