"""`benchmarks.adapters`: what it lets learners exchange, and its table. Measurements are not tested."""

from support import ROOT

from benchmarks.adapters import exchanged, table
from training.config import LoraConfig

CONFIG = ROOT / "configs" / "librispeech_100.yaml"


def test_adapters_of_a_percent_of_the_weights_are_a_percent_of_the_exchange():
    whole = exchanged(CONFIG, 256, None)
    some = exchanged(CONFIG, 256, LoraConfig(rank=8, modules=("*attention*",)))
    assert 0.005 < some / whole < 0.015


def test_table_has_a_row_for_each_measurement():
    row = {"strategy": "adpsgd", "trained": "full", "weights": 1234567, "bytes_per_step": 2.5e6, "step_s": 0.31}
    lines = table([row | {"exchanges_per_step": 0.25}, row | {"exchanges_per_step": 0.0}], 0.3).splitlines()
    assert lines[-2:] == [
        "| adpsgd | full | 1,234,567 | 2,500 | 310 | 0.25 |",
        "| adpsgd | full | 1,234,567 | 2,500 | 310 | – |",
    ]
