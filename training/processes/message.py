"""Messages between a training's processes: pydantic models that refuse unknown fields."""

from pydantic import BaseModel, ConfigDict, ValidationError


class Message(BaseModel):
    """A message, or a part of one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def first_problem(error: ValidationError) -> str:
    """The first invalid field of a message, and what is wrong with it."""
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'header'}: {problem['msg']}"
