"""Small checks of one value each, shared by everything that validates what a user sent.

Each raises InvalidRequest that says which field, what was given and what is allowed. Types are strict: a bool is no
number, a string is no number, NaN and infinity are no numbers at all.
"""

from __future__ import annotations

import math
from typing import Any

from headrace.errors import InvalidRequest

MAX_SHOWN = 80
INT64_MAX = 2**63 - 1


def shown(value: Any) -> str:
    """The value as an error message shows it: short, on one line, and never a failure itself."""
    try:
        text = repr(value[: MAX_SHOWN + 1] if isinstance(value, str | bytes | list | tuple) else value)
    except Exception:  # an integer of 10,000 digits has no repr; a foreign object may do anything
        text = f"a value of type {type(value).__name__}"
    text = text.encode("ascii", "backslashreplace").decode("ascii")
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def refusal(param: str, value: Any, allowed: str, *, code: str | None = None) -> InvalidRequest:
    """The one form of the sentence: `temperature must be a number >= 0, not 'hot'.`"""
    given = "but is missing or null" if value is None else f"not {shown(value)}"
    return InvalidRequest(f"{param} must be {allowed}, {given}.", param=param, code=code)


def check_int(value: Any, param: str, low: int, high: int, allowed: str | None = None) -> int:
    if type(value) is not int or not low <= value <= high:
        raise refusal(param, value, allowed or f"an integer from {low} to {high}")
    return value


def check_number(
    value: Any, param: str, low: float, high: float, allowed: str | None = None, *, open_low: bool = False
) -> float:
    """A finite number in [low, high], or in (low, high] with `open_low`; returned as float."""
    allowed = allowed or f"a number from {low:g} to {high:g}"
    if type(value) is not int and type(value) is not float:
        raise refusal(param, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        raise refusal(param, value, allowed) from None
    if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
        raise refusal(param, value, allowed)
    return number


def check_bool(value: Any, param: str) -> bool:
    if type(value) is not bool:
        raise refusal(param, value, "true or false")
    return value


def check_text(value: Any, param: str, *, max_chars: int | None = None, allow_empty: bool = False) -> str:
    allowed = "a string" if allow_empty else "a non-empty string"
    if max_chars is not None:
        allowed += f" of at most {max_chars} characters"
    if (
        not isinstance(value, str)
        or (not value and not allow_empty)
        or (max_chars is not None and len(value) > max_chars)
    ):
        raise refusal(param, value, allowed)
    return value


def check_name(value: Any, param: str, *, max_chars: int = 128) -> str:
    """An id or label that goes into headers and log lines: printable ASCII, no space at either end."""
    allowed = f"1 to {max_chars} printable ASCII characters"
    if not isinstance(value, str) or not 0 < len(value) <= max_chars:
        raise refusal(param, value, allowed)
    if not all(" " <= character <= "~" for character in value) or value != value.strip(" "):
        raise refusal(param, value, allowed)
    return value


def check_token_ids(value: Any, param: str, vocab_size: int, *, max_length: int | None = None) -> tuple[int, ...]:
    """A list of token ids within the vocabulary. The length is looked at first: a list of millions costs nothing."""
    if not isinstance(value, list | tuple):
        raise refusal(param, value, "a list of token ids")
    if max_length is not None and len(value) > max_length:
        raise InvalidRequest(f"{param} must hold at most {max_length} token ids, not {len(value)}.", param=param)
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise refusal(f"{param}[{index}]", token_id, f"a token id from 0 to {vocab_size - 1}")
    return tuple(value)
