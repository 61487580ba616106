"""Plans as JSON text: sorted, one line for each variable, tensor and op."""

from __future__ import annotations

import functools
import json
from collections.abc import Container, Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

import tfpar
from tfpar.plans.schema import FORMAT, VERSION, PlanFile, read_custom
from tfpar.readable import FieldError, UnreadableError, convert, parse_json, read_text
from tfpar.spec import PlanError, TfparError

if TYPE_CHECKING:
    from tfpar.plans.plan import Plan


def text_of(plan: Plan) -> str:
    """Format `plan` as JSON."""
    file = PlanFile.of(plan)
    keys = zip(file.__struct_encode_fields__, file.__struct_fields__, strict=True)
    fields = {key: getattr(file, name) for key, name in keys}
    lines = [
        f"  {_json(key)}: {_field_json(key, value)}"
        for key, value in fields.items()
        if value is not UNSET
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def fields_of(text: str, source: str) -> dict[str, Any]:
    """Read the fields of the plan that `text_of` wrote; `source` names the text in errors.

    Raises:
        PlanError: corrupt, malformed, or written by a newer tfpar.
    """
    try:
        data = parse_json(text)
    except UnreadableError as error:
        raise PlanError(
            f"The plan file {source!r} is corrupt: {error}. Save the plan again."
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f"{source!r} is not a plan file of tfpar.")
    version = data.get("version")
    if isinstance(version, int) and version > VERSION:
        raise PlanError(
            f"The plan file {source!r} was written by a newer tfpar ({data.get('tfpar')}, "
            f"format {version}; this is {tfpar.__version__}, format {VERSION}). Upgrade tfpar, or "
            f"make a new plan."
        )
    if version != VERSION:
        raise PlanError(f"The plan file {source!r} has no known format version: {version!r}.")
    try:
        return convert(data, PlanFile, read_custom).read()
    except FieldError as error:
        raise PlanError(f"The plan file {source!r} is malformed: {error}.") from error
    except TfparError as error:
        raise PlanError(f"The plan file {source!r} is malformed: {error}") from error


# --- writing ---------------------------------------------------------------------------

_BY_LINE = frozenset(
    (
        "attempts",
        "rivals",
        "rentals",
        "trials",
        "layouts",
        "baselines",
        "constraints",
        "variables",
        "tensors",
        "ops",
    )
)
"""The fields that have a line for each entry."""

_STAGES_BY_LINE = frozenset(("schedule", "scopes", "owners"))
"""Those of the stages; of the report, every list has."""


def _as_python(number: Any) -> Any:
    """A number of numpy as Python has it."""
    return number.item()


_as_builtins = functools.partial(msgspec.to_builtins, enc_hook=_as_python)
_json = json.JSONEncoder(default=_as_builtins).encode


def _field_json(name: str, value: Any) -> str:
    if name in _BY_LINE:
        return _block(value)
    if name == "stages" and value is not None:
        return _block(_as_builtins(value), _STAGES_BY_LINE)
    if name == "report":
        return _block(value, [key for key, each in value.items() if isinstance(each, list | tuple)])
    return _json(value)


def _block(
    value: Mapping[str, Any] | Sequence[Any], by_line: Container[str] = (), indent: int = 4
) -> str:
    """A line for each entry; for each entry of an entry, where its key is in `by_line`."""
    if not value:
        return _json(value)

    def entry(key: str, each: Any) -> str:
        text = _block(each, (), indent + 2) if key in by_line else _json(each)
        return f"{_json(key)}: {text}"

    if isinstance(value, Mapping):
        (first, last), entries = "{}", [*starmap(entry, value.items())]
    else:
        (first, last), entries = "[]", [*map(_json, value)]
    lines = ",\n".join(f"{' ' * indent}{each}" for each in entries)
    return f"{first}\n{lines}\n{' ' * (indent - 2)}{last}"


def read_plan_file(path: str) -> str:
    """Read the text of a plan file.

    Raises:
        PlanError: missing, or unreadable.
    """
    try:
        return read_text(path)
    except UnreadableError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise PlanError(
                f"There is no plan file {path!r}. Plans are written by plan.save(path)."
            ) from None
        raise PlanError(f"Cannot read the plan file {path!r}: {error}.") from error
