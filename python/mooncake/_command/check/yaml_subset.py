"""Reads the YAML that configurations of engines are written in, where PyYAML is not installed.

It knows mappings, lists of plain values, quoted and plain scalars, JSON between brackets, and
comments. Other YAML is refused with the number of its line.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["load_yaml"]

_KEY = re.compile(r"""("[^"]*"|'[^']*'|[^\s#:'"{}\[\],&*!|>%@`-][^:#]*?)\s*:(?:\s+(.*))?$""")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}
_NUMBER = re.compile(r"[-+]?\d+")
_FRACTION = re.compile(r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?")


def load_yaml(text: str) -> Any:
    """Return the content of a document.

    Raises:
        ValueError: The text is not YAML, or not the YAML that is known here.
    """
    try:
        import yaml
    except ImportError:
        return _Reader(text).document()
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


class _Reader:
    """The lines of a document that have content: number, indentation and text."""

    __slots__ = ("_at", "_lines")

    def __init__(self, text: str) -> None:
        self._lines: list[tuple[int, int, str]] = []
        self._at = 0
        for number, line in enumerate(text.splitlines(), 1):
            content = _without_comment(line).rstrip()
            if content.strip() and content != "---":
                indent = len(content) - len(content.lstrip(" "))
                self._lines.append((number, indent, content.strip()))

    def document(self) -> Any:
        if not self._lines:
            return None
        value = self._block(self._lines[0][1])
        if self._at < len(self._lines):
            raise self._refusal("is indented otherwise than the lines before")
        return value

    def _block(self, indent: int) -> Any:
        is_list = self._lines[self._at][2].startswith("- ")
        return self._list(indent) if is_list else self._mapping(indent)

    def _mapping(self, indent: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._at < len(self._lines) and self._lines[self._at][1] == indent:
            match = _KEY.fullmatch(self._lines[self._at][2])
            if match is None:
                raise self._refusal("is no setting: write NAME: VALUE")
            name, rest = match[1].strip("\"'"), match[2]
            if rest is None or not rest.strip():
                self._at += 1
                is_below = self._at < len(self._lines) and (
                    self._lines[self._at][1] > indent
                    or (self._lines[self._at][1] == indent and self._is_item())
                )
                found[name] = self._block(self._lines[self._at][1]) if is_below else None
            else:
                found[name] = self._scalar(rest.strip())
                self._at += 1
        return found

    def _list(self, indent: int) -> list[Any]:
        found = []
        while (
            self._at < len(self._lines) and self._lines[self._at][1] == indent and self._is_item()
        ):
            found.append(self._scalar(self._lines[self._at][2][2:].strip()))
            self._at += 1
        return found

    def _is_item(self) -> bool:
        return self._lines[self._at][2].startswith("- ")

    def _scalar(self, text: str) -> Any:
        if text[0] in "{[":
            try:
                return json.loads(text)
            except ValueError as error:
                raise self._refusal(f"is no JSON: {error}") from error
        if text[0] in "\"'":
            if len(text) < 2 or text[-1] != text[0]:
                raise self._refusal("has a quote without an end")
            return text[1:-1]
        if text[0] in "&*!|>%@`":
            raise self._refusal(f"begins a value with {text[0]}, which needs PyYAML")
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if _NUMBER.fullmatch(text):
            return int(text)
        return float(text) if _FRACTION.fullmatch(text) else text

    def _refusal(self, why: str) -> ValueError:
        number, _, text = self._lines[self._at]
        return ValueError(f"line {number} {why}: {text[:80]}")


def _without_comment(line: str) -> str:
    quote = ""
    for at, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and (at == 0 or line[at - 1] in " :[,{"):
            quote = character
        elif character == "#" and (at == 0 or line[at - 1] == " "):
            return line[:at]
    return line
