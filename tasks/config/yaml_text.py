"""YAML from people: plain values only, and no more of them than a configuration can have; and values as YAML."""

from typing import Any

import yaml

MOST = 1_000_000
"""Values of a document at most, those counted again that an alias repeats: nine lines can stand for a billion."""


_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses a key that a mapping has twice: YAML 1.1 forbids it, PyYAML keeps the last value."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        # here, and not where mappings are made: by then `<<` has been replaced by keys that may well be overridden
        node = super().compose_mapping_node(anchor)  # type: ignore[no-untyped-call]
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key = "<<" if key_node.tag == _MERGE else self.construct_object(key_node)  # type: ignore[no-untyped-call]
            line = key_node.start_mark.line + 1
            if key in lines:
                raise yaml.YAMLError(
                    f"{key_node.value!r} is given in line {lines[key]} and again in line {line}: keep one"
                )
            lines[key] = line
        return node


def parse_yaml(text: str) -> Any:
    """The value of a YAML document; no tag makes an object.

    Raises:
        YAMLError: If it is none, gives a key of a mapping twice, is nested too deeply, contains itself, or stands
            for too many values.
    """
    try:
        value = _Loader(text).get_single_data()
        if _count(value, {}, set()) > MOST:
            raise yaml.YAMLError(f"its aliases stand for more than {MOST} values: write them out, or leave them out")
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except ValueError as error:  # such as a number of five thousand digits
        raise yaml.YAMLError(str(error)) from error
    return value


def one_line(value: Any) -> str:
    """A plain value as YAML on one line; mappings keep their order."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1_000_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _count(value: Any, known: dict[int, int], above: set[int]) -> int:
    """Values in a value, itself included; each list and mapping is looked at once."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) in above:
        raise yaml.YAMLError("it contains itself by an alias")
    if id(value) not in known:
        above.add(id(value))
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(part, known, above) for part in parts)
        above.discard(id(value))
    return known[id(value)]
