"""Walks folders together with those that links in them lead to: disks are often joined into one folder by links."""

import os
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path


def walk_folders(
    top: Path | str, on_error: Callable[[OSError], object] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield folders with the names of their subfolders and files, as `os.walk` does, in order.

    Links to folders are followed, each folder is walked once, and links cannot lead in a circle. A link to the top
    folder, to one below it (which is walked where it is) or to one above it (which has more than was given) is not
    followed.

    Args:
        top: The folder.
        on_error: Called with the error of a folder that cannot be listed; by default it is left out.
    """
    inside = os.path.realpath(top)
    seen = {inside}

    def is_new(folder: str, name: str) -> bool:
        path = f"{folder}/{name}"
        place = os.path.realpath(path)
        around = os.path.commonpath([inside, place])
        if place in seen or (Path(path).is_symlink() and around in (inside, place)):
            return False
        seen.add(place)
        return True

    for folder, subfolders, names in os.walk(top, onerror=on_error, followlinks=True):
        subfolders[:] = [name for name in sorted(subfolders) if is_new(folder, name)]
        yield folder, subfolders, sorted(names)


def files_below(top: Path, pattern: str = "*") -> list[Path]:
    """The files below a folder whose names match a pattern, sorted by path; links are followed as by `walk_folders`.

    Args:
        top: The folder.
        pattern: As for `fnmatch`; capitals are other letters.
    """
    walked = walk_folders(top)
    return sorted(Path(folder, name) for folder, _, names in walked for name in names if fnmatchcase(name, pattern))
