"""kill -9 of a Prefect worker ended the flow that it had started as soon as that logged anything."""

import logging
import os

from prefect.logging.handlers import PrefectConsoleHandler

from flows.ending import outlive_reader


def test_lines_that_nobody_reads_any_more_end_nothing():
    """A killed worker closes the pipe of its flows; rich, in Prefect's handler, answers that with SystemExit."""
    reading, writing = os.pipe()
    os.close(reading)
    log = logging.getLogger("tests.nobody")
    with open(writing, "w") as file:
        log.addHandler(PrefectConsoleHandler(stream=file))
        try:
            outlive_reader()
            log.error("to nobody")
            log.error("again")
        finally:
            log.handlers.clear()
