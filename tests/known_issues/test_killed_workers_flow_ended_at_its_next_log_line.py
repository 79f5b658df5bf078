"""kill -9 of a Prefect worker ended the flow that it had started as soon as that logged anything."""

import logging
import os

from prefect.logging.handlers import PrefectConsoleHandler

from flows.servers.shutdown import outlive_reader

ENDED, WENT_ON = 3, 0


def log_to_closed_pipe(prepare):
    """Run a process that logs to a pipe without a reader, in a child, since its standard output may be lost."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 4
    try:
        reading, writing = os.pipe()
        os.close(reading)
        log, file = logging.getLogger("tests.nobody"), open(writing, "w")  # noqa: SIM115 - the child ends soon
        log.addHandler(PrefectConsoleHandler(stream=file))
        prepare()
        log.error("to nobody")
        log.error("again")
        status = WENT_ON if os.path.samestat(os.fstat(writing), os.stat(os.devnull)) else 5
    except SystemExit:
        status = ENDED
    finally:
        os._exit(status)


def test_flow_survives_logging_to_a_closed_pipe():
    """A killed worker closes the pipe of its flows; rich, in Prefect's handler, then raises SystemExit."""
    assert log_to_closed_pipe(lambda: None) == ENDED
    assert log_to_closed_pipe(outlive_reader) == WENT_ON
