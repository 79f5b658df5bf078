"""The corpus that a command is given: a folder, a table, a manifest, or a configuration with sources."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.common import print_line
from flows.cli.configs import YAML_SUFFIXES, packaged_configs

if TYPE_CHECKING:
    from tasks.config.data import DataConfig

HELP = (
    "Folder of recordings and transcripts, a table, a manifest, or a configuration (YAML file or packaged name), whose "
    "sources are taken."
)


def corpus_data(path: Path, kind: str = "", *, language: str = "en", sets: bool = True) -> "DataConfig":
    """The corpus of `corpus_and_seed`."""
    return corpus_and_seed(path, kind, language=language, sets=sets)[0]


def corpus_and_seed(path: Path, kind: str = "", *, language: str = "en", sets: bool = True) -> "tuple[DataConfig, int]":
    """The sources of a corpus, as `starling init` finds them, or of a configuration, with its rules for the data.

    What was taken for what is printed on standard error, unless the corpus is one source without other column names.

    Args:
        path: The corpus or configuration; if there is no such file or folder, the name of a packaged configuration.
        kind: Layout of the corpus; detected if it is empty or "auto".
        language: Language of its transcripts.
        sets: Whether the parts of the corpus are to be told apart.

    Returns:
        The sources, and the seed with which a run would draw from them; without a configuration there is nothing to
        draw, and it is 1, the default.

    Raises:
        CorpusError: If there is nothing that can be used.
        ConfigError: If the configuration is wrong.
        ValueError: If the kind or the language of a configuration's sources is given.
    """
    from tasks.config.data import DataConfig
    from tasks.config.pipeline import load_config
    from tasks.dataset.discovery import find_corpus

    path = path.expanduser()
    if not path.exists():
        path = packaged_configs().get(str(path), path)
    if path.suffix in YAML_SUFFIXES and not path.is_dir():
        if kind not in ("", "auto") or language != "en":
            raise ValueError(f"{path} gives the kind and language of its sources: remove --kind and --language")
        config = load_config(path)
        return config.data, config.seed
    corpus = find_corpus(path, kind, sets=sets)
    if len(corpus.sources) > 1 or any(
        source.path != path or source.columns or source.where for source in corpus.sources
    ):
        with redirect_stdout(sys.stderr):
            for source in corpus.sources:
                print_line(f"found: {source.description()}")
            if corpus.warning:
                print_line(f"warning: {corpus.warning}")
    return DataConfig(sources=tuple(source.config(language) for source in corpus.sources)), 1
