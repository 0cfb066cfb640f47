"""The command line that each PowerShell gives to a Windows program for a list of arguments.

PowerShell hands on one line, which the program takes apart again; how the line is made changed over the years. The
rules are those of `NativeCommandParameterBinder.cs` in PowerShell's repository and of the reports on it:

* Windows PowerShell 5.1 puts quotes around an argument with white space outside of double quotes, and does nothing
  else: an empty argument vanishes, an inner double quote is not escaped, a last backslash eats the closing quote
  (PowerShell#1995, #4358).
* PowerShell 6 to 7.2 double the backslashes before that closing quote (#4965).
* PowerShell 7.3 hands a list to .NET, which escapes everything as the C runtime reads it (#14747).
* PowerShell 7.5 and 7.6 also put the home folder in the place of a leading `~` where the argument comes from a
  variable and has no white space (#20402, #21323).
* A word that the script itself got as a parameter (`Dashed`) is handed on by the first two without quotes.
* Up to 7.2 the word `--%` vanishes and what follows is handed on as it is.
"""

from collections.abc import Sequence

from shells.powershell_values import Dashed

VERSIONS = ("5.1", "7.2", "7.3", "7.6")
USER = "C:\\users\\me"


def command_line(version: str, program: str, words: Sequence[str]) -> str:
    """The command line of `& program @words` in that version of PowerShell on Windows."""
    if version in ("5.1", "7.2"):
        return " ".join([f'"{program}"', *_legacy(words, doubled=version == "7.2")])
    if version == "7.6":
        words = [_expanded(word) for word in words]
    return " ".join([f'"{program}"', *map(_escaped, words)])


def _blank(character: str) -> bool:
    # What Python calls a blank and .NET does not are control characters; U+180E was one until Unicode 6.3.
    return character == "\u180e" or (character.isspace() and character not in "\x1c\x1d\x1e\x1f")


def _legacy(words: Sequence[str], *, doubled: bool) -> list[str]:
    parts = []
    verbatim = False
    for word in words:
        if word == "--%" and not verbatim:
            verbatim = True
        elif not verbatim and not isinstance(word, Dashed) and _needs_quotes(word):
            parts.append(f'"{word}{_last_backslashes(word) if doubled else ""}"')
        else:
            parts.append(str(word))
    return parts


def _needs_quotes(word: str) -> bool:
    inside = escaped = needed = False
    for character in word:
        if character == '"' and not escaped:
            inside = not inside
        elif _blank(character) and not inside:
            needed = True
        escaped = character == "\\"
    return needed


def _escaped(word: str) -> str:
    if word and not any(_blank(character) or character == '"' for character in word):
        return str(word)
    made = ""
    for number, piece in enumerate(word.split('"')):
        made += ('\\"' if number else "") + piece
        if number < word.count('"'):
            made += _last_backslashes(piece)
    return f'"{made}{_last_backslashes(word)}"'


def _expanded(word: str) -> str:
    plain = not any(map(_blank, word)) and (word == "~" or word[:2] in ("~/", "~\\"))
    return USER + word[1:] if plain else word


def _last_backslashes(word: str) -> str:
    return word[len(word.rstrip("\\")) :]
