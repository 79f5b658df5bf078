"""A challenger was compared with the champion although a language model that it decodes with may know the test text.

`allow_test_text` was looked up for the sections `lm` and `decode` alone: not for the section `rescoring`, nor for a
GMM-HMM, whose decoder is that of the section `align`.
"""

import pytest
from support import tiny_document

from tasks.config.pipeline import parse_config
from tasks.stages.base import Run
from tasks.tracking.significance import lm_refusal

TEXT = {"text": {"paths": ["t.txt"], "allow_test_text": True}}
SECOND = {"lm": {}, "decode": {"kind": "words", "rescore_nbest": 10}}
GMM = {"recognizer": "gmm", "align": {}}


@pytest.mark.parametrize(
    ("fields", "section"),
    [({**SECOND, "rescoring": TEXT}, "rescoring"), ({**SECOND, "rescoring": {}}, ""), ({**GMM, "lm": TEXT}, "lm")],
)
def test_what_the_decoder_reads_counts(fields, section):
    said = f"({section}.text.allow_test_text is true)" if section else ""
    refusal = lm_refusal(Run(parse_config(tiny_document(**fields)), "r"))
    assert said in refusal
    assert bool(refusal) == bool(section)
