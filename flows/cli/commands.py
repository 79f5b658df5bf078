"""Settings that all commands share: `-h`, and flags without a type in the help."""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def _untyped_flags(parameters: list[Any]) -> list[Any]:
    """Give flags an empty metavar: the help would show `<bool>` beside them."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped_flags(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped_flags(super().get_params(ctx))


class _GroupWithDefault(_Group):
    """A group whose command `run` may be left out: `starling search CONFIG` is `starling search run CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next((word for word in args if not word.startswith("-")), "")
        if first and first not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


class CommandGroup(typer.Typer):
    """A group of commands with the settings of this module.

    Args:
        text: Help of the group.
        runs_by_default: Whether the command `run` may be left out.
        settings: More settings of typer.
    """

    def __init__(self, text: str, runs_by_default: bool = False, **settings: Any) -> None:
        super().__init__(
            cls=_GroupWithDefault if runs_by_default else _Group,
            help=text,
            no_args_is_help=True,
            context_settings={"help_option_names": ["-h", "--help"]},
            rich_markup_mode="rich",
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:  # type: ignore[override]
        """Decorate a function as a command."""
        return super().command(name, cls=_Command, **settings)
