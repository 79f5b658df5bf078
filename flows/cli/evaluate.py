"""`starling evaluate`: the error rate of any model on any corpus, without training."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.common import (
    JsonOption,
    SetOption,
    err,
    friendly,
    interruptible,
    on_prefect,
    out,
    print_json,
    progress_bars,
    say,
)
from flows.cli.configs import complete_config_or_file
from flows.cli.found_corpus import HELP, corpus_data
from flows.cli.run import NoPrefectOption


@friendly
def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="NAME (its champion), NAME@ALIAS, NAME/VERSION, models:/…, or a bundle's folder."),
    ],
    corpus: Annotated[Path, typer.Argument(help=HELP, autocompletion=complete_config_or_file)],
    kind: Annotated[str, typer.Option("--kind", help="Layout. Default: detected.", show_default=False)] = "auto",
    split: Annotated[str, typer.Option("--split", help="Score only this part of the corpus, such as test.")] = "",
    language: Annotated[str, typer.Option("--language", help="Language of the transcripts.")] = "en",
    limit: Annotated[int, typer.Option("--limit", help="Only the first utterances; 0: all.", min=0)] = 0,
    overrides: SetOption = None,
    no_prefect: NoPrefectOption = False,
    json_output: JsonOption = False,
) -> None:
    """Recognize and score a corpus with an existing model: error rates, intervals and a report; nothing is trained."""
    from flows.models import fetch_model, model_uri
    from flows.summary import print_summary
    from tasks.stages.evaluation import evaluation_config

    with redirect_stdout(sys.stderr), interruptible():
        sources = corpus_data(corpus, kind, language=language, sets=bool(split)).sources
        if not split:
            say("all recordings of the corpus are scored, also those that the model may have been trained on")
        uri = model_uri(model)
        name = corpus.expanduser().resolve().name
        config = evaluation_config(fetch_model(uri), name, sources, split, limit=limit, overrides=overrides)
        summary = _execute(config, uri, no_prefect)
    print_summary(summary, err if json_output else out)
    if json_output:
        print_json(summary)


def _execute(config: Any, model: str, no_prefect: bool) -> dict[str, Any]:
    from tasks.orchestration.reachable import check_servers

    check_servers(config, "score", say)
    if no_prefect:
        from flows.pipeline import evaluate_plainly

        with progress_bars():
            return evaluate_plainly(config, model)
    with on_prefect(say):
        from flows.pipeline import evaluate as flow

        evaluation: Any = flow  # a flow's types omit what it returns
        summary: dict[str, Any] = evaluation(config, until="score", model=model, as_configured=True)
    return summary
