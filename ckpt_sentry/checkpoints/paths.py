"""
Credentials in paths: masked before a path, or a text that quotes one, leaves the process.
"""

from __future__ import annotations

import re
from typing import Final

from ckpt_sentry.audit.escape import shown

MASK: Final = "***"

_NOT_SECRET_USERS: Final = frozenset({"abfs", "abfss", "wasb", "wasbs", "ssh", "git+ssh", "sftp"})
"""Schemes whose `name@host` without a colon is a container or a login name, no secret."""

_NO_PORT: Final = frozenset({"s3", "s3a", "s3n", "gs", "gcs", "az", "r2", "oss", "cos"})
"""Schemes whose host is a bucket: digits after its colon are no port, but the beginning of a secret."""

_SCHEME = r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]{0,30})://"
# Part of a name that says that a secret follows: AWS, Google and Azure signed links, connection strings, OAuth.
_NAMES = (
    r"signature|credentials?|passw(?:or)?d|passphrase|passwd|pwd|secret|sig|(?:security|session)?[-_]?token"
    r"|api[-_]?key|(?:secret|shared|account|storage|encryption|private)[-_]?(?:access[-_]?)?key(?:[-_]?id)?"
    r"|access[-_]?key(?:[-_]?id)?|access[-_]?id|authorization"
)
# Names that are only secret as a parameter of a URL: elsewhere a `key=` is a key of a state dict.
_URL_NAMES = r"key|auth|sas|code|jwt|se?cr?et"
_ASSIGN = r"(?:=|%3[Dd])"
_KNOWN_FORMS = re.compile(
    r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{16}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|glpat-[\w\-]{20,})"
)
_FOLD_SYNTAX = re.compile(r"\\([{},])")
_BEARER = re.compile(r"(?i)\b(bearer|authorization:\s*basic)(\s+)[A-Za-z0-9._~+/=\-]{6,}")
_QUOTED = re.compile(
    rf"""(?ix)(?P<name>["'](?:[\w.\-]*[-_.])?(?:{_NAMES})["']\s*:\s*)(?:"[^"]*"|'[^']*')""",
)


def _rules(stop: str, user_stop: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    # `stop` holds the characters, beside & and ;, at which a value in this kind of text ends.
    value = rf"""(?:"[^"]*"|'[^']*'|[^&;{stop}]+)"""
    named = rf"(?i)(?P<name>(?<![A-Za-z])(?:{_NAMES}){_ASSIGN}|(?<=[a-z0-9])(?:{_NAMES}){_ASSIGN}){value}"
    in_url = rf"(?i)(?P<name>(?:[?&;]|%3F|%26)(?:{_URL_NAMES}){_ASSIGN}){value}"
    user = rf"{_SCHEME}(?P<user>[^{user_stop}?#@]*)@(?:[^{user_stop}?#/@]*@)*"
    return re.compile(user), re.compile(named), re.compile(in_url)


_TEXT_RULES = _rules(r"\s\"'<>", r"\s\"<>")
_PATH_RULES = _rules("\0", "\0")


def mask(path: str) -> str:
    """
    The path or URL with user information, signatures, tokens and keys replaced by `***`; the rest stays readable.
    """
    return _apply(path, _PATH_RULES)


def mask_text(text: str) -> str:
    """
    The same for free text, such as the message of an exception, that may hold any number of paths.
    """
    return _apply(text, _TEXT_RULES)


def _apply(text: str, rules: tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]) -> str:
    user, named, in_url = rules
    if "://" in text:
        text = user.sub(_without_user, text)
    if "=" in text or "%3" in text:
        text = named.sub(_without_value, text)
        text = in_url.sub(_without_value, text)
    text = _QUOTED.sub(_without_value, text)
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    return _KNOWN_FORMS.sub(MASK, text)


def _without_value(match: re.Match[str]) -> str:
    return match["name"] + MASK


def _without_user(match: re.Match[str]) -> str:
    scheme, user = match["scheme"], match["user"]
    host = user.partition("/")[0]
    port = scheme.lower() not in _NO_PORT and re.fullmatch(r"[^:]*:[0-9]{1,5}", host)
    if "/" in user and (":" not in host or port):
        return match[0]  # The @ stands in the path: this part ended with a host and perhaps a port.
    if ":" not in user and scheme.lower() in _NOT_SECRET_USERS:
        return match[0]
    return f"{scheme}://{MASK}@"


def shown_path(path: str) -> str:
    """
    A path as a report may print it: credentials masked, control characters escaped, cut at 300 characters.
    """
    return _FOLD_SYNTAX.sub(r"\1", shown(mask(path)))
