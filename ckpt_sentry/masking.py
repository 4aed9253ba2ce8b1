"""
Credentials: masked in every string that leaves the process.

Facts stay raw inside, so that the file which they name can still be opened. Whatever carries them out calls `clean`:
a load for its events and its report, the wire, the log, the renderers, and what logs an own error. Texts that are
shortened are masked before that (`shown`): half a URL cannot be told from none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, Final, TypeVar

from ckpt_sentry.dataclasses_ import is_dataclass, parts, replace

T = TypeVar("T")

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
# Secrets that are known by their beginning. Where a word may begin so, its rest must look like chance: long, and with
# a digit or a capital letter (`sk-learn-intro`, `hf_quantizer`).
_KNOWN_FORMS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS
    r"|hf_(?:(?=[a-z0-9]*[A-Z])[A-Za-z0-9]{20,}|[A-Za-z0-9]{30,})"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"  # GitHub
    r"|glpat-[\w\-]{20,}"  # GitLab
    r"|sk-(?:[a-z0-9]{2,12}-){0,3}(?=[A-Za-z_]*[0-9])[A-Za-z0-9_]{16,}(?:-[\w\-]*)?"  # OpenAI, Anthropic
    r"|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"  # Stripe
    r"|xox[abeoprs]-[A-Za-z0-9\-]{10,}"  # Slack
    r"|AIza[\w\-]{35}|ya29\.[\w\-]{20,}"  # Google
    r"|eyJ[\w\-]{10,}\.eyJ[\w\-]{10,}\.[\w\-]*"  # a JSON Web Token
    r")"
)
_HEADER = re.compile(
    r"(?i)\b((?:x-[a-z\-]{0,40}(?:token|key|signature|secret)|api-key|private-token)\s*:\s+)[^\s,;\"']+"
)
_BEARER = re.compile(r"(?i)\b(bearer|authorization:\s*basic)(\s+)[A-Za-z0-9._~+/=\-]{6,}")
_QUOTED = re.compile(
    rf"""(?ix)(?P<name>["'](?:[\w.\-]*[-_.])?(?:{_NAMES})["']\s*:\s*)(?:"[^"]*"|'[^']*')""",
)


_SHORT: Final = 200
_LONGEST: Final = 1_024
"""Characters of user information that are looked through for its end."""


def _rules(stop: str, user_stop: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    # `stop` holds the characters, beside & and ;, at which a value in this kind of text ends.
    value = rf"""(?P<value>"[^"]*"|'[^']*'|[^&;{stop}]+)"""
    named = rf"(?i)(?P<name>(?<![A-Za-z])(?:{_NAMES}){_ASSIGN}|(?<=[a-z0-9])(?:{_NAMES}){_ASSIGN}){value}"
    in_url = rf"(?i)(?P<name>(?:[?&;#]|%3F|%26|%23)(?:{_URL_NAMES}){_ASSIGN}){value}"
    user = rf"{_SCHEME}(?P<user>[^{user_stop}?#@]{{0,{_LONGEST}}})@(?:[^{user_stop}?#/@]{{0,{_LONGEST}}}@){{0,8}}"
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
    return _remembered(text) if len(text) <= _SHORT else _apply(text, _TEXT_RULES)


@lru_cache(maxsize=2_048)
def _remembered(text: str) -> str:
    # Names of runs, ranks' machines and phases leave again and again.
    return _apply(text, _TEXT_RULES)


def _apply(text: str, rules: tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]) -> str:
    user, named, in_url = rules
    if "://" in text and "@" in text:
        text = user.sub(_without_user, text)
    if "=" in text or "%3" in text:
        text = named.sub(_without_value, text)
        text = in_url.sub(_without_value, text)
    if ":" in text:
        text = _QUOTED.sub(lambda match: match["name"] + MASK, text)
        text = _HEADER.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    return _KNOWN_FORMS.sub(MASK, text)


def _without_value(match: re.Match[str]) -> str:
    # A segment of a path (`/token=…/step-5`) ends with it; in a query the value may hold slashes.
    in_path = match.string[: match.start()].endswith(("/", "%2F"))
    rest = "".join(match["value"].partition("/")[1:]) if in_path else ""
    return match["name"] + MASK + rest


def _without_user(match: re.Match[str]) -> str:
    scheme, user = match["scheme"], match["user"]
    host = user.partition("/")[0]
    port = scheme.lower() not in _NO_PORT and re.fullmatch(r"[^:]*:[0-9]{1,5}", host)
    if "/" in user and (":" not in host or port):
        return match[0]  # The @ stands in the path: this part ended with a host and perhaps a port.
    if ":" not in user and scheme.lower() in _NOT_SECRET_USERS:
        return match[0]
    return f"{scheme}://{MASK}@"


def clean(value: T) -> T:
    """
    The same value with every string in it masked: a string, a dataclass, or tuples, lists and mappings of them.

    Keys of mappings are names of ours and stay. What holds no secret is the very same object.
    """
    made: T = _clean(value, "")
    return made


def clean_path(path: str) -> str:
    """
    What `clean` makes of a path in a dataclass.
    """
    return _known_path(path) if len(path) <= _SHORT else mask(_apply(path, _TEXT_RULES))


@lru_cache(maxsize=2_048)
def _known_path(path: str) -> str:
    return mask(_remembered(path))


def _clean(value: Any, name: str) -> Any:
    kind = value.__class__
    if kind is str:
        masked = clean_path(value) if name.endswith("path") else mask_text(value)
        return value if masked == value else masked
    if kind is tuple or kind is list:
        items = [item if item.__class__ in _NO_TEXT else _clean(item, name) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            return items if kind is list else tuple(items)
    elif fields := _fields(kind):
        changed = {}
        for field in fields:
            old = getattr(value, field)
            # Most are numbers or empty, and this is done for each event of each load.
            if old.__class__ in _NO_TEXT or old is _EMPTY:
                continue
            if (new := _clean(old, field)) is not old:
                changed[field] = new
        return replace(value, **changed) if changed else value
    else:
        return _clean_other(value, name)
    return value


def _clean_other(value: Any, name: str) -> Any:
    """
    The same for what is of a class that is derived from one of these.
    """
    if isinstance(value, str):
        masked = _clean(str(value), name)
        return value if masked == value else masked
    if isinstance(value, (tuple, list)):
        items = [_clean(item, name) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        return {key: _clean(item, str(key)) for key, item in value.items()}
    return value


_EMPTY: Final[tuple[Any, ...]] = ()
_NO_TEXT: Final = frozenset({int, float, bool, type(None), bytes})


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(part.name for part in parts(kind)) if is_dataclass(kind) else ()
