"""The reference of the configuration: complete, current, and every field explained."""

from typing import Annotated, Literal

from pydantic import Field
from support import ROOT

from configurable.choices import Choice, OneOf, choice_of
from configurable.configuration import Configuration, descriptions
from tasks.config.mistakes import _models_in
from tasks.config.pipeline import PipelineConfig
from tasks.config.reference import reference


class Small(Choice):
    """A small one.

    With details.
    """

    kind: Literal["small"] = "small"
    size: int = Field(default=1, ge=1, lt=9)
    """How large
    it is."""


class Large(Small):
    """A large one."""

    kind: Literal["large"] = "large"  # type: ignore[assignment]
    rooms: tuple[str, ...] = ("a", "b")
    """What is | in it."""


class Part(Configuration):
    """A part."""

    share: float = Field(default=0.5, gt=0)
    """A share."""
    pair: tuple[float, float] | None = None
    """Two numbers."""


class Whole(Configuration):
    name: str
    """Its name."""
    one: Part = Part(share=0.25)
    """The first part."""
    two: Part = Part()
    """The second part."""
    parts: tuple[Part, ...] = ()
    """More of them."""
    house: Annotated[Small, OneOf({"small": Small, "large": Large}, "small")] = Large(rooms=("c",))
    """Where it is."""


def rows(text):
    return [line for line in text.splitlines() if line.startswith("| `")]


def test_types_bounds_and_defaults_are_described_in_words():
    lines = rows(reference(Whole))
    assert "| `name` | text | required | Its name. |" in lines
    assert "| `pair` | list of 2: number or nothing | nothing | Two numbers. |" in lines
    assert "| `size` | integer ≥ 1, < 9 | `1` | How large it is. |" in lines
    assert "| `rooms` | list of text | `[a, b]` | What is \\| in it. |" in lines


def test_section_has_its_defaults_and_is_written_once():
    text = reference(Whole)
    assert text.count("A share.") == 1
    assert "| `share` | number > 0 | `0.25` | A share. |" in text
    assert "## `two`\n\nThe second part.\n\nFields as of `one`.\n" in text
    assert "## `parts`\n\nMore of them.\n\nFields as of `one`.\n" in text


def test_shared_fields_of_kinds_come_first_and_once():
    text = reference(Whole)
    assert text.count("`size`") == 1
    assert text.index("Fields of every kind") < text.index("`size`") < text.index("**`kind: small`**: A small one.\n")
    assert text.index("**`kind: large`**: A large one.") < text.index("`rooms`")


def test_reference_page_in_docs_is_current():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == reference(PipelineConfig), "run `make tables`"


def fields(model, known):
    """All fields of a class and of those below it, with the classes."""
    if model in known:
        return
    known.add(model)
    for name, field in model.model_fields.items():
        yield model, name, field
        choice = choice_of(field)
        for below in [*_models_in(field.annotation), *(choice.kinds.values() if choice else ())]:
            yield from fields(below, known)


ALL = list(fields(PipelineConfig, set()))


def missing_parts(page, model, name, field):
    """Parts of a field's description that the reference lacks."""
    if issubclass(model, Choice) and name == "kind":
        return  # the section lists the kinds, each with its sentence
    if not descriptions(model).get(name, "").rstrip().endswith("."):
        yield f"{model.__name__}.{name}: add a sentence below the field"
    if f"| `{field.alias or name}` |" not in page:
        yield f"{model.__name__}.{name}: no row"


def test_every_field_has_a_sentence_and_a_row():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert len(ALL) > 500
    assert [missing for fields in ALL for missing in missing_parts(page, *fields)] == []
    assert len(list(missing_parts("", Whole, "unnamed", Field()))) == 2


def test_every_kind_has_a_sentence():
    kinds = [
        (kind, model) for _, _, field in ALL if (choice := choice_of(field)) for kind, model in choice.kinds.items()
    ]
    assert len(kinds) > 30
    assert [kind for kind, model in kinds if not model.__dict__.get("__doc__")] == []
