"""What the site has beyond the pages of docs/: pages of the checkout's root, files that pages link to, and the API.

Links in the pages are those of the checkout, so that they work in an editor and on a forge. Here they become links of
the site: `../RESULTS.md` of docs/experiments.md becomes `RESULTS.md`; a file such as `../examples/tabular.py` is
copied.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    **{f"{name}.md": f"{name}.md" for name in ("RESULTS", "CHANGELOG", "CONTRIBUTING")},
}
"""Pages of the checkout's root, and where the site has them."""
REGISTRIES = {
    "Models": "speech.models.registry:MODELS",
    "Decoder networks": "speech.models.registry:DECODER_NETWORKS",
    "Predictors of transducers": "speech.models.registry:PREDICTORS",
    "Objectives": "speech.objectives:OBJECTIVES",
    "Features": "speech.features.registry:FEATURES",
    "Decoders": "speech.decoding:DECODERS",
    "Language models": "speech.lm:LANGUAGE_MODELS",
    "Lexicons": "speech.lexicon:LEXICONS",
    "Voice activity detectors": "speech.vad:DETECTORS",
    "Strategies": "training.strategies.registry:STRATEGY_CONFIGS",
    "Corpora": "storage.corpora:READERS",
}
"""Registries of the page on kinds: heading and attribute."""
_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that forges give them."""
    config.mdx_configs.setdefault("toc", {}).update(slugify=slugify(case="lower"), permalink=True)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, the API, and the files that pages link to."""
    for source, place in ROOT_PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "api/starling.md", content=_public_names()))
    files.append(File.generated(config, "api/kinds.md", content=_kinds()))
    for file in list(files.documentation_pages()):
        for target in _LINK.findall(_FENCE.sub("", file.content_string)):
            path = _in_checkout(file, target[1])
            if files.get_file_from_path(_on_site(path)) is None and (ROOT / path).is_file():
                files.append(File.generated(config, _on_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links of the checkout links of the site."""

    def changed(match: re.Match[str]) -> str:
        target = _on_site(_in_checkout(page.file, match[2]))
        return match[1] + posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    return "".join(_LINK.sub(changed, text) + code for text, code in _parts(markdown))


def _parts(markdown: str) -> Iterator[tuple[str, str]]:
    """Pieces of text, each with the code block that follows it."""
    start = 0
    for match in _FENCE.finditer(markdown):
        yield markdown[start : match.start()], match[0]
        start = match.end()
    yield markdown[start:], ""


def _in_checkout(file: File, target: str) -> str:
    """Path in the checkout of what a page links to."""
    own = next((source for source, place in ROOT_PAGES.items() if place == file.src_uri), f"docs/{file.src_uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(own), target))


def _on_site(path: str) -> str:
    """Path below the site's sources of a file of the checkout."""
    return ROOT_PAGES.get(path, path.removeprefix("docs/"))


def _public_names() -> str:
    package = import_module("starling")
    modules: Mapping[str, str] = package._MODULES
    names = {f"{modules[name]}.{name}": f"starling.{name}" for name in sorted(modules)}
    text = (
        "The names that the package `starling` exports. [Your own model](../own-model.md) explains `Ring`; "
        "[a notebook](../../examples/first_model.ipynb) uses the others."
    )
    blocks = (_block(name, level=2, heading=heading) for name, heading in names.items())
    return f"# The package starling\n\n{text}\n\n" + "".join(blocks)


def _kinds() -> str:
    text = (
        "What a configuration chooses from by `kind`. [The reference](../reference.md) lists every field with its "
        "default; [the architecture](../architecture.md#where-to-add-things) says how to add one."
    )
    lines = [f"# Kinds\n\n{text}\n"]
    for title, registry in REGISTRIES.items():
        module, _, name = registry.partition(":")
        lines.append(f"## {title}\n\nThe registry is `{name}` in `{module}`.\n")
        for kind, entry in getattr(import_module(module), name).items():
            where = entry.replace(":", ".") if isinstance(entry, str) else f"{entry.__module__}.{entry.__qualname__}"
            lines.append(f"### `{kind}`\n\n" + _block(where, level=4))
    return "\n".join(lines)


def _block(name: str, level: int, heading: str = "") -> str:
    """What mkdocstrings turns into the documentation of a name."""
    options = {"heading_level": level, "heading": heading or name, "toc_label": heading or name}
    return f"::: {name}\n    options:\n" + "".join(f"      {key}: {value}\n" for key, value in options.items()) + "\n"
