"""Settings that all commands share: `-h`, flags without a type in the help, and former names of options."""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from flows.cli.common import say
from tasks import STAGES

RENAMED = {"--plain": "--no-prefect", "--again": "--force"}
"""Former names of flags, which version 0.1 still accepts, and their present names."""


def _untyped_flags(parameters: list[Any]) -> list[Any]:
    """Give flags an empty metavar: the help would show `<bool>` beside them."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped_flags(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._renamed(args))

    def _renamed(self, args: list[str]) -> list[str]:
        """Replace former names of this command's flags, with a warning."""
        known = {name for parameter in self.params for name in parameter.opts}
        end = args.index("--") if "--" in args else len(args)
        words = list(args)
        for place, word in enumerate(args[:end]):
            name = RENAMED.get(word, "")
            # --force of promote, restore and init overrides a check: it never was --again
            if word not in known and name in known and (name != "--force" or self.name in STAGES):
                say(f"warning: {word} is now called {name}; the old name will stop working in the next version")
                words[place] = name
        return words


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped_flags(super().get_params(ctx))


class CommandGroup(typer.Typer):
    """A group of commands with the settings of this module.

    Args:
        text: Help of the group.
        settings: More settings of typer.
    """

    def __init__(self, text: str, **settings: Any) -> None:
        super().__init__(
            cls=_Group,
            help=text,
            no_args_is_help=True,
            context_settings={"help_option_names": ["-h", "--help"]},
            rich_markup_mode="rich",
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:  # type: ignore[override]
        """Decorate a function as a command."""
        return super().command(name, cls=_Command, **settings)
