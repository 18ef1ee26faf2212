"""`mooncake check`: tells what is right and what is wrong in the settings of an engine."""

from mooncake._command.check.command import add_options, run

__all__ = ["add_options", "run"]
