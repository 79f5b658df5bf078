"""A refused Google key was answered with "Check GOOGLE_APPLICATIONCREDENTIALS", which nothing reads."""

import re

import pytest

import storage.objects
from storage.backends import BACKENDS
from storage.retries import CREDENTIALS, RetryPolicy, with_retries


@pytest.mark.parametrize("protocol", CREDENTIALS)
def test_variables_in_the_remedy_are_those_of_the_documentation(protocol):
    def refuse():
        raise PermissionError("Forbidden")

    with pytest.raises(OSError, match="the rights of that key") as caught:
        with_retries(refuse, f"{protocol}://bucket/x", RetryPolicy(attempts=1))
    named = re.findall(r"\b[A-Z]+_[A-Z_]+\b", str(caught.value))
    assert named
    assert all(name.startswith(BACKENDS[protocol].variables) for name in named)
    assert any(name in storage.objects.__doc__ for name in named)
