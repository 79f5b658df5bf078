"""An exchange's figures in shared memory: what is written, and when."""

import os

import pytest

from training.exchange import protocol
from training.exchange.mailbox import Mailbox, make_file
from training.exchange.protocol import Report


class Averager:
    skipped = 4


@pytest.fixture
def mailbox():
    file = make_file(8)
    mailbox = Mailbox(file, 8)
    yield mailbox
    mailbox.close()
    os.close(file)


def test_all_statistics_are_written(mailbox):
    report = Report(mailbox)
    report.write(1.0, Averager)
    assert (mailbox.last_peer, mailbox.finished, mailbox.skipped, mailbox.beat) == (-1, 0, 4, 1.0)
    report.initiated, report.failed, report.bytes_sent = 3, 1, 10
    report.answered(100, last=False)
    report.answered(50, last=True)
    report.received(20, late=False)
    report.received(20, late=True)
    report.finish(0.5, squares=36.0, compared=4, node=2)
    report.finish(0.25, squares=0.0, compared=0, node=5)  # every chunk was left out: the distance stays
    report.write(1.0, Averager)
    counts = ("initiated", "finished", "failed", "answered", "late", "bytes_sent", "bytes_received", "last_peer")
    assert [getattr(mailbox, name) for name in counts] == [3, 2, 1, 1, 1, 160, 190, 5]
    assert (mailbox.last_s, mailbox.total_s, mailbox.distance) == (0.25, 0.75, 3.0)
    assert mailbox.cpu_seconds > 0


def test_finished_exchanges_are_written_at_once_other_figures_periodically(mailbox):
    report = Report(mailbox)
    report.write(1.0, Averager)
    report.answered(10, last=False)  # the exchange continues
    report.write(1.01, Averager)
    assert (mailbox.bytes_sent, mailbox.beat) == (0, 1.0)
    report.write(1.06, Averager)
    assert (mailbox.bytes_sent, mailbox.beat) == (10, 1.06)
    report.answered(10, last=True)
    report.answered(10, last=False)
    report.write(1.07, Averager)
    assert (mailbox.bytes_sent, mailbox.answered) == (30, 1)
    report.finish(0.1, 0.0, 0, 1)
    report.write(1.08, Averager)
    assert mailbox.finished == 1
    report.initiated = 9
    report.write(1.09, Averager)
    assert mailbox.initiated == 0


def test_refusals_are_logged_with_a_rate_limit_per_peer_and_reason(mailbox, monkeypatch, caplog):
    report, now = Report(mailbox), [100.0]
    monkeypatch.setattr(protocol.time, "monotonic", lambda: now[0])
    for at, node, why in ((100, 1, "a"), (101, 1, "a"), (101, 2, "a"), (101, 1, "b"), (159, 1, "a"), (160, 1, "a")):
        now[0] = float(at)
        report.refuse(node, why)
    assert [record.args for record in caplog.records] == [(1, "a"), (2, "a"), (1, "b"), (1, "a")]
