"""`mooncake completion`: scripts that complete commands and options in bash, zsh and fish."""

from __future__ import annotations

import argparse

from mooncake._command.parser import commands_of

__all__ = ["SHELLS", "script"]

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
# Completion of the command mooncake for bash: source <(mooncake completion bash)
_mooncake() {
    local word=${COMP_WORDS[COMP_CWORD]} known
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        known='%(commands)s'
    else
        case ${COMP_WORDS[1]} in
%(cases)s
        esac
    fi
    if [ "$COMP_CWORD" -eq 1 ] || [ "${word#-}" != "$word" ]; then
        COMPREPLY=($(compgen -W "$known" -- "$word"))
    fi
}
complete -o default -F _mooncake mooncake
"""

_ZSH = """\
#compdef mooncake
# Completion of the command mooncake for zsh: source <(mooncake completion zsh)
_mooncake() {
    local -a known
    if (( CURRENT == 2 )); then
        known=(
%(commands)s
        )
        _describe 'command' known
        return
    fi
    case ${words[2]} in
%(cases)s
    esac
    if [[ $PREFIX == -* ]]; then
        _describe 'option' known
    else
        _files
    fi
}
compdef _mooncake mooncake
"""


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script of a shell.

    Args:
        parser: Parser of the whole command.
        shell: One of `SHELLS`.
    """
    known = {name: _options_of(command) for name, command in commands_of(parser).items()}
    if shell == "fish":
        return _fish(parser, known)
    if shell == "zsh":
        return _zsh(parser, known)
    cases = "\n".join(
        f"            {name}) known='{' '.join(options)}' ;;" for name, options in known.items()
    )
    return _BASH % {"commands": " ".join(known), "cases": cases}


def _options_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the long options of a command with their help."""
    return {
        option: action.help or ""
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }


def _helps(parser: argparse.ArgumentParser) -> dict[str, str]:
    return {name: command.description or "" for name, command in commands_of(parser).items()}


def _plain(text: str) -> str:
    """Return a text without characters that a shell or a list of zsh would act on."""
    return text.replace("%%", "%").translate(str.maketrans("", "", "'\\`$[]")).replace(":", ",")


def _zsh(parser: argparse.ArgumentParser, known: dict[str, dict[str, str]]) -> str:
    def quoted(items: dict[str, str]) -> list[str]:
        return [f"'{name}:{_plain(text)}'" for name, text in items.items()]

    commands = "\n".join(f"            {line}" for line in quoted(_helps(parser)))
    cases = "\n".join(
        f"        {name}) known=({' '.join(quoted(options))}) ;;" for name, options in known.items()
    )
    return _ZSH % {"commands": commands, "cases": cases}


def _fish(parser: argparse.ArgumentParser, known: dict[str, dict[str, str]]) -> str:
    lines = ["# Completion of the command mooncake for fish: mooncake completion fish | source"]
    for name, text in _helps(parser).items():
        begin = "complete -c mooncake -n __fish_use_subcommand -f"
        lines.append(f"{begin} -a {name} -d '{_plain(text)}'")
    for name, options in known.items():
        for option, text in options.items():
            begin = f"complete -c mooncake -n '__fish_seen_subcommand_from {name}'"
            lines.append(f"{begin} -l {option[2:]} -d '{_plain(text)}'")
    return "\n".join(lines) + "\n"
