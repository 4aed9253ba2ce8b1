"""
Honest pickles read as data; hostile ones end in one clear error, soon, and run nothing.
"""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_sentry.formats.torch_save import machine as pickle_machine
from ckpt_sentry.formats.torch_save.unpickle import CostlyPickle, Opaque, UnreadablePickle, load, mapping, record

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(-(2**59), 2**59), inner) | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@given(value=PLAIN, protocol=st.sampled_from([2, 3, 4, 5]))
def test_plain_data_is_read_as_the_standard_library_does(value: object, protocol: int) -> None:
    allowed = {("_codecs", "encode"): lambda text, _codec: text.encode("latin-1"), ("__builtin__", "bytes"): bytes}
    data = pickle.dumps(value, protocol)
    loaded = load(data, allowed)
    assert loaded[:3] == (value, (), len(data))


@given(value=PLAIN, cut=st.floats(0, 1, exclude_max=True))
def test_a_truncated_pickle_is_unreadable(value: object, cut: float) -> None:
    data = pickle.dumps(value)
    with pytest.raises(UnreadablePickle):
        load(data[: int(len(data) * cut)], {})


@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_unreadable(data: bytes) -> None:
    with contextlib.suppress(UnreadablePickle):
        assert 0 < load(data, {("torch", "Size"): tuple, ("collections", "OrderedDict"): mapping}).end <= len(data)


class Bomb:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.flag),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_what_is_not_allowed_is_named_and_not_run(tmp_path: Path, protocol: int) -> None:
    flag = tmp_path / "ran"
    loaded = load(pickle.dumps({"w": Bomb(flag)}, protocol), {})
    value = loaded.value["w"]
    assert isinstance(value, Opaque)
    assert (value.name, value.args) == ("mkdir", (str(flag),))
    assert loaded.unknown == (value.qualified,)
    assert not flag.exists()


class Point:
    def __init__(self) -> None:
        self.x = 1


class Slotted:
    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = 2


class Listing(list):  # type: ignore[type-arg]
    pass


class Table(dict):  # type: ignore[type-arg]
    pass


def test_unknown_objects_keep_their_content_as_data() -> None:
    loaded = load(pickle.dumps([Point(), Slotted(), Listing([1, 2]), Table(a=3)]), {})
    point, slotted, listing, table = loaded.value
    assert (point.field("x"), slotted.field("x"), listing.elements, table.entries) == (1, 2, [1, 2], {"a": 3})
    assert point.field("y", 0) == 0
    assert loaded.unknown == tuple(sorted(f"{__name__}.{name}" for name in ("Point", "Slotted", "Listing", "Table")))
    assert repr(point) == f"Opaque('{__name__}.Point')"


def test_an_allowed_record_is_not_among_the_unknown() -> None:
    loaded = load(pickle.dumps(Point()), {(__name__, "Point"): record(__name__, "Point")})
    assert (loaded.value.qualified, loaded.value.field("x"), loaded.unknown) == (f"{__name__}.Point", 1, ())


def test_ordered_dict_and_offset() -> None:
    first, second = pickle.dumps("first", 2), pickle.dumps(collections.OrderedDict(a=1), 2)
    allowed = {("collections", "OrderedDict"): mapping}
    assert load(first + second, allowed).end == len(first)
    assert load(first + second, allowed, start=len(first))[:3] == ({"a": 1}, (), len(first + second))


def test_persistent_ids() -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return ("storage", 7) if isinstance(obj, Point) else None

    out = io.BytesIO()
    Pickler(out, 2).dump([Point()])
    assert load(out.getvalue(), {}, persistent=lambda identity: identity).value == [("storage", 7)]
    with pytest.raises(UnreadablePickle, match="refers to data outside of itself"):
        load(out.getvalue(), {})


HOSTILE = {
    "empty": (b"", "is empty"),
    "no pickle": (b"\xff\xfe", "is no pickle"),
    "protocol from the future": (b"\x80\x09N.", "unknown pickle protocol 9"),
    "eight exabytes of text": (b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"a", "ends before its end"),
    "four gigabytes of bytes": (b"\x80\x04B\xff\xff\xff\xff", "ends before its end"),
    "negative length": (b"\x80\x04\x8b\xff\xff\xff\xff", "ends before its end"),
    "a get without its put": (b"\x80\x04j\xff\xff\xff\xff.", "is corrupt"),
    "a hash of 2**100 steps": (
        b"\x80\x04})" + b"2\x86" * 100 + b"Ns.",
        "has a key of an unexpected kind",
    ),
    "a deep key": (b"\x80\x04})" + b"\x85" * 100_000 + b"Ns.", "has a key of an unexpected kind"),
    "a huge key": (b"\x80\x04}\x8a\x10" + b"\x01" * 16 + b"Ns.", "has a key of an unexpected kind"),
    "a list as key": (b"\x80\x04}]Ns.", "has a key of an unexpected kind"),
    "underflow": (b"\x80\x04\x87.", "is corrupt"),
    "no mark": (b"\x80\x04t.", "is corrupt"),
    "a call of a value": (b"\x80\x04K\x01)R.", "calls a value"),
    "arguments that are none": (b"\x80\x04cos\nsystem\nNR.", "calls with arguments that are no tuple"),
    "items of a number": (b"\x80\x04K\x01NNs.", "sets items of something that is no dict"),
    "append to a number": (b"\x80\x04K\x01Na.", "appends to something that is no list"),
    "a global named by a number": (b"\x80\x04K\x01K\x02\x93.", "names a global by something that is no text"),
    "an extension code": (b"\x80\x04\x82\x01.", "is no pickle"),
    "a number of ten thousand digits": (b"\x80\x02L" + b"9" * 10_000 + b"L\n.", "is corrupt"),
    "no stop": (b"\x80\x04N", "ends before its end"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(UnreadablePickle) as caught:
        load(data, {})
    assert reason in str(caught.value)
    assert 0 <= caught.value.position <= len(data)


def test_a_huge_memo_index_costs_nothing() -> None:
    assert load(b"\x80\x02K\x07r\xff\xff\xff\xff.", {}).value == 7


def test_shared_references_stay_shared() -> None:
    laughs: object = []
    for _ in range(100):
        laughs = [laughs, laughs]
    value = load(pickle.dumps(laughs), {}).value
    assert value[0] is value[1]


def test_too_large_and_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnreadablePickle, match="is larger than 10 bytes"):
        load(b"." * 11, {}, max_bytes=10)
    monkeypatch.setattr(pickle_machine, "MAX_CONTAINERS", 100)
    with pytest.raises(UnreadablePickle, match="holds more than 100 objects"):
        load(b"\x80\x04" + b"]" * 101 + b".", {})


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(UnreadablePickle("is empty", 3)))
    assert (error.reason, error.position) == ("is empty", 3)


def _named(module: bytes, name: bytes) -> bytes:
    return b"c" + module + b"\n" + name + b"\n"


AGAIN = "refers to the same data again and again"
SWELLING = {
    "one list copied into very many": (
        b"]("
        + b"N" * 100_000
        + b"eq\x000"
        + _named(b"collections", b"OrderedDict")
        + b"q\x010"
        + b"h\x01h\x00\x85R0" * 99,
        AGAIN,
    ),
    "attributes joined again and again": (
        b"}(" + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(20_000)) + b"uq\x000"
        b"cthey\nclass\n)R" + b"h\x00h\x00\x86b" * 99,
        AGAIN,
    ),
    "a call with very many arguments": (
        _named(b"collections", b"OrderedDict") + b"(" + b"N" * 300 + b"tR",
        "calls with 300 arguments",
    ),
    "a global of a long name": (
        b"X" + struct.pack("<I", 9_999) + b"a" * 9_999 + b"q\x00h\x00\x93",
        "names a global by a text that is no name",
    ),
    "a key with a long text in it": (
        b"}X" + struct.pack("<I", 9_999) + b"a" * 9_999 + b"\x85N" + b"s",
        "has a key of an unexpected kind",
    ),
    "a number with many bytes within a key": (
        b"}\x8b" + struct.pack("<I", 9_999) + b"\x7f" * 9_999 + b"\x85Ns",
        "has a key of an unexpected kind",
    ),
}


@pytest.mark.parametrize("name", SWELLING)
def test_what_swells_is_left_alone(name: str) -> None:
    data, reason = SWELLING[name]
    with pytest.raises(CostlyPickle, match=reason):
        load(b"\x80\x02" + data + b".", {("collections", "OrderedDict"): lambda pairs=(), *_: list(pairs)})


def test_a_set_is_a_list_so_that_nothing_in_it_is_hashed() -> None:
    assert load(b"\x80\x04\x8f(]K\x01\x90.", {}).value == [[], 1]
    assert load(b"\x80\x04(]K\x01\x91.", {}).value == ([], 1)


def test_the_hash_of_a_tuple_cannot_be_foreseen() -> None:
    assert load(pickle.dumps({(1, "a"): 2}), {}).value == {"(1, 'a')": 2}


def test_equal_long_texts_are_one_object() -> None:
    # A dict compares equal keys that are two objects character by character, each time.
    long = "k" * 10_000
    first, second = load(pickle.dumps([long, "".join(long)[:-1] + "k"]), {}).value
    assert first is second


def test_a_memo_in_text_form_has_an_end() -> None:
    with pytest.raises(UnreadablePickle, match="a memo that no pickler writes"):
        load(b"\x80\x02Np4294967296\n.", {})


def test_an_honest_pickle_may_copy_what_it_holds() -> None:
    value = {"ids": set(range(100_000)), "more": [collections.OrderedDict((str(n), n) for n in range(1_000))] * 3}
    allowed = {("__builtin__", "set"): list, ("collections", "OrderedDict"): mapping}
    assert load(pickle.dumps(value, 2), allowed).value["ids"] == list(value["ids"])
