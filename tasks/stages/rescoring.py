"""Stage rescoring: a second language model, with which the decoder ranks its best hypotheses again.

The stage runs only if the configuration has the section `rescoring`. It estimates as the stage `lm` does, from the
transcripts and the text that its own section names; pronunciations are the first model's.
"""

from dataclasses import replace
from functools import partial

from speech.lexicon import GraphemesConfig
from storage.stages import StageOutput
from tasks.stages.base import Inputs, Run, Stage
from tasks.stages.lm import LM, LmRecord, figures, lm_artifacts


def _with_second(run: Run) -> Run:
    """The run with the section `rescoring` in place of `lm`, and no lexicon."""
    return replace(run, config=run.config.model_copy(update={"lm": run.config.rescoring, "lexicon": GraphemesConfig()}))


def _inputs(run: Run) -> Inputs:
    return LM.inputs(_with_second(run))


def _work(run: Run, output: StageOutput) -> LmRecord:
    return LM.work(_with_second(run), output)


RESCORING = Stage(
    "rescoring",
    3,
    _inputs,
    _work,
    artifacts=lm_artifacts,
    figures=partial(figures, stage="rescoring"),
    reads="transcripts, text",
    writes="as of lm, without a lexicon",
    only="with a section `rescoring`",
)
