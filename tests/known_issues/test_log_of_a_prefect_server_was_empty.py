"""A Prefect server that a command started, and that ended by an error, left an empty log.

It inherited the setting by which commands keep Prefect's messages from the terminal.
"""

import pytest
from support import environment

from flows.servers.services import ServiceError, start_prefect


def test_the_error_that_ended_a_server_is_told(home):
    (home / "prefect" / "prefect.db").mkdir(parents=True)
    with environment(PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL="CRITICAL"):
        server = start_prefect()
    with pytest.raises(ServiceError, match=r"(?s)the end of .*prefect\.log.*unable to open database file"):
        server.wait()
