"""Stage outputs that the registry refers to, for any number of versions."""

from types import SimpleNamespace

from tasks.stages.housekeeping import registered_outputs
from tasks.tracking.runs import KEY_TAG


class Page(list):
    """Versions, and where the next ones are."""

    def __init__(self, versions, token):
        super().__init__(versions)
        self.token = token


def test_every_page_of_versions_is_read(monkeypatch):
    """If a version were missed, the data of its model would be deleted."""
    versions = [
        SimpleNamespace(name="m", version=number, tags={KEY_TAG: f"k{number}"} if number != 2 else {})
        for number in range(1, 6)
    ]
    pages = {None: Page(versions[:2], "a"), "a": Page(versions[2:4], "b"), "b": Page(versions[4:], "")}
    api = SimpleNamespace(search_model_versions=lambda query, max_results, page_token: pages[page_token])
    monkeypatch.setattr("tasks.tracking.runs.client", lambda: api)
    assert registered_outputs() == {f"register/k{number}": f"m/{number}" for number in (1, 3, 4, 5)}
