"""What a check finds: settings that are right, that are odd, and that are wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

__all__ = ["Finding", "Findings", "Level", "nearest"]

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result.

    Attributes:
        level: ``ok``, ``note`` (nothing to do), ``warning`` (it may be meant) or ``error``.
        field: Setting that is meant, as ``extra_config.protocol``; empty: none.
        text: What was found.
        remedy: What to do; empty if nothing.
    """

    level: Level
    field: str
    text: str
    remedy: str = ""

    def json(self) -> dict[str, str]:
        """Return the finding for JSON."""
        return {
            "level": self.level,
            "field": self.field,
            "text": self.text,
            "remedy": self.remedy,
        }


@dataclass(slots=True)
class Findings:
    """The results of a check, in the order in which they were found.

    Attributes:
        place: Beginning of the names of settings, as ``extra_config.``.
        rows: The results.
    """

    place: str = ""
    rows: list[Finding] = field(default_factory=list)

    def below(self, name: str) -> Findings:
        """Return the same findings for the settings below one, which add to these."""
        return Findings(f"{self.place}{name}.", self.rows)

    def in_file(self, path: str) -> Findings:
        """Return the same findings for the settings of another file, which add to these."""
        return Findings(f"{path}: ", self.rows)

    def add(self, level: Level, name: str, text: str, remedy: str = "") -> None:
        """Add a result about a setting of this place."""
        self.rows.append(Finding(level, f"{self.place}{name}" if name else "", text, remedy))

    def unknown(self, given: Iterable[str], known: Iterable[str], program: str) -> None:
        """Add a result for each given name that is not known: a misspelled one is an error."""
        names = list(known)
        for name in sorted(set(given) - set(names)):
            near = nearest(name, names)
            if near:
                self.add("error", name, "is no setting", f"Write {near}.")
            else:
                self.add("note", name, f"is no setting of a store; {program} may read it itself")

    def of_type(self, settings: dict[str, Any], name: str, kind: type, example: str) -> bool:
        """Return whether a setting is there and of that type; adds a result if it is of another."""
        value = settings.get(name)
        if value is None:
            return False
        is_bool_for_number = isinstance(value, bool) and kind is not bool
        if isinstance(value, kind) and not is_bool_for_number:
            return True
        what = f"is {_named(value)}, not {_TYPES[kind]}"
        self.add("error", name, what, f"Write {example}.")
        return False

    @property
    def worst(self) -> Level:
        """The worst level."""
        levels = [row.level for row in self.rows]
        order: tuple[Level, ...] = ("error", "warning", "note")
        return next((level for level in order if level in levels), "ok")


_TYPES = {
    str: "text",
    dict: "an object with settings",
    int: "a whole number",
    bool: "true or false",
}


def nearest(name: str, known: Iterable[str], least: float = 0.8) -> str:
    """Return the known name that is probably meant, or an empty text.

    Args:
        name: What is given.
        known: Names that are known.
        least: Least likeness, from 0 to 1.
    """
    by_lower = {each.lower(): each for each in known}
    near = get_close_matches(name.lower().replace("-", "_"), by_lower, 1, least)
    return by_lower[near[0]] if near else ""


def _named(value: Any) -> str:
    """Return a value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
