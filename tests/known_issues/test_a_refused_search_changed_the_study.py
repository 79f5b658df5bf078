"""A search that was refused, since its study is another search's, left its own limits and names in that study.

`starling search status` then showed the losses of the former search as error rates, for example, and its epochs as
minutes; and a search that was asked to stop was no longer asked to.
"""

import pytest

from tasks.search.study import Studies, StudyError

ABOUT = {"minimize": "loss", "budget": "epochs", "trials": 5}


def test_refused_search_changes_nothing(tmp_path):
    studies = Studies(f"sqlite:///{tmp_path / 's.db'}")
    studies.create("s", {"minimize": "loss"}, ABOUT).ask_to_stop()
    with pytest.raises(StudyError, match="was made with another minimize"):
        studies.create("s", {"minimize": "wer"}, {"minimize": "wer", "budget": "minutes", "trials": 9})
    study = studies.open("s")
    assert (study.about, study.minimized, study.unit, study.stopping) == (ABOUT, "loss", "epochs", True)


def test_same_search_with_other_limits_goes_on(tmp_path):
    studies = Studies(f"sqlite:///{tmp_path / 's.db'}")
    studies.create("s", {"minimize": "loss"}, ABOUT).ask_to_stop()
    more = ABOUT | {"trials": 9}
    made = studies.create("s", {"minimize": "loss"}, more)
    assert (made.about, studies.open("s").about, made.stopping) == (more, more, False)
