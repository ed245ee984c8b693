"""Settings out of a YAML file: names that the record has, each with a value of its kind.

    told = read_settings("run.yaml", TrainSettings)      # {"steps": 500, "learning_rate": 0.001}

YAML takes 1e-3 for a word and `on` for true; here they are what was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from amoeba.core.errors import bad_value

_IN_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "nothing"}
_UNFIT = object()


def read_settings(yaml_file: str, kind: type) -> dict[str, Any]:
    """kind: a dataclass."""
    import yaml

    path = Path(yaml_file)
    if not path.is_file():
        raise FileNotFoundError(f"--config: expected a YAML file; got {yaml_file}, which is not there. Check the path.")
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise bad_value(str(path), "YAML", f"{error}".replace("\n", " "), "correct the file") from error
    hints = get_type_hints(kind)
    if not isinstance(found, dict) or not set(found) <= set(hints):
        raise _unknown(path, found, sorted(hints))
    return {name: _typed(path, name, value, hints[name]) for name, value in found.items()}


def _unknown(path: Path, found: object, known: list[str]) -> ValueError:
    unknown = sorted(str(name) for name in found if name not in known) if isinstance(found, Mapping) else []
    got = ", ".join(map(repr, unknown)) or f"a {type(found).__name__}"
    meant = [near for name in unknown for near in get_close_matches(name, known, n=1)]
    remedy = f"perhaps {', '.join(meant)} was meant" if meant else "remove or rename what is not among them"
    return bad_value(str(path), f"a mapping of {', '.join(known)}", got, remedy)


def _typed(path: Path, name: str, value: object, hint: Any) -> Any:
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    for kind in kinds:
        fit = _as(kind, value)
        if fit is not _UNFIT:
            return fit
    expected = " or ".join(_in_words(kind) for kind in kinds)
    remedy = "put it in quotes" if str in kinds and isinstance(value, bool | int | float) else "correct the file"
    raise bad_value(f"{name} in {path}", expected, repr(value), remedy)


def _as(kind: Any, value: object) -> Any:
    """The value as one of this kind, or _UNFIT."""
    if get_origin(kind) is Literal:
        if isinstance(value, bool) and "on" in get_args(kind):
            return "on" if value else "off"
        return value if value in get_args(kind) else _UNFIT
    if get_origin(kind) is tuple:
        if isinstance(value, str):  # as the flag takes them
            return tuple(value.replace(",", " ").split())
        return tuple(value) if isinstance(value, list) and all(isinstance(each, str) for each in value) else _UNFIT
    if kind is float:
        return _as_number(value)
    return value if type(value) is kind else _UNFIT


def _as_number(value: object) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return _UNFIT
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return _UNFIT


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return _IN_WORDS.get(kind, "a list of names")
