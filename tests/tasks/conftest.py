"""Fixtures of the tests of tasks."""

import pytest
from support import load_beside

api = load_beside(__file__, "registered.py").api


@pytest.fixture
def fragment():
    """Renders a part of the report by its name."""
    from tasks.stages.report import _PAGES

    return lambda name, **values: _PAGES.get_template(f"{name}.html").render(**values).strip()
