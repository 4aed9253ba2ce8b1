from __future__ import annotations

import gzip
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckpt_sentry.formats import sniff
from ckpt_sentry.formats.sniff import FileFacts

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 548105171\n"
HTML = b"<!DOCTYPE html>\n<html><head><title>Access\n restricted</title></head><body></body></html>\n"
TENSORS = {"a": torch.ones(30, 4), "b": torch.ones(7)}


def safetensors_bytes(tmp_path: Path) -> bytes:
    save_file(TENSORS, tmp_path / "source")
    return (tmp_path / "source").read_bytes()


def zip_bytes(tmp_path: Path) -> bytes:
    torch.save(TENSORS, tmp_path / "source")
    return (tmp_path / "source").read_bytes()


def test_real_files_are_what_they_are(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(tmp_path))
    (tmp_path / "x.bin").write_bytes(zip_bytes(tmp_path))
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
    (tmp_path / "m.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    (tmp_path / "config.json").write_text("[1]")

    assert sniff.sniff(tmp_path / "old.pt").kind == "torch_legacy"
    assert sniff.sniff(tmp_path / "plain.pkl").kind == "pickle"
    assert sniff.sniff(tmp_path / "x.safetensors") == FileFacts(
        "safetensors", (tmp_path / "x.safetensors").stat().st_size
    )
    assert sniff.sniff(tmp_path / "x.bin") == FileFacts("torch_zip", (tmp_path / "x.bin").stat().st_size)
    assert sniff.sniff(tmp_path / "script.pt").detail == "TorchScript"
    assert sniff.sniff(tmp_path / "m.index.json") == FileFacts("index", 38)
    assert sniff.sniff(tmp_path / "config.json") == FileFacts("json", 3)
    assert all(sniff.findings(tmp_path / name) == () for name in ("x.safetensors", "x.bin", "old.pt", "m.index.json"))


def test_a_dcp_folder_and_its_shard(tmp_path: Path) -> None:
    dcp.save({"model": TENSORS}, checkpoint_id=tmp_path / "step-3", no_dist=True)

    assert sniff.sniff(tmp_path / "step-3") == FileFacts("dcp_folder", 0)
    assert sniff.sniff(tmp_path / "step-3" / "__0_0.distcp").kind == "dcp_shard"
    for path in (tmp_path / "step-3", tmp_path / "step-3" / "__0_0.distcp"):
        (found,) = sniff.findings(path)
        assert (found.code, found.level) == ("dcp_checkpoint", "error")
        assert found.text.startswith(path.name)
        assert "dcp_to_torch" in str(found.next)
    assert sniff.findings(tmp_path / "step-3", loader="dcp") == ()

    (tmp_path / "step-3" / ".metadata").unlink()
    assert sniff.sniff(tmp_path / "step-3") == FileFacts(
        "dcp_folder", 0, "shards without .metadata: the save never finished"
    )


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (LFS, "lfs_pointer", "is a Git LFS pointer (for a file of 548,105,171 bytes)"),
        (HTML, "html_page", 'is a web page (titled "Access restricted")'),
        (b"\xef\xbb\xbf  <html>", "html_page", "is a web page"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "html_page", "is a web page"),
        (b"", "empty_file", "has no content: 0 bytes"),
        (b"GGUF\x03\0\0\0", "unknown_format", "is a GGUF file (llama.cpp)"),
        (gzip.compress(b"x"), "unknown_format", "is gzip-compressed"),
        (b"\0" * 4096, "unknown_format", "is nothing but zero bytes at its start"),
        (b"some text that is long enough", "unknown_format", "is no known checkpoint format"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_what_is_no_checkpoint_is_named(tmp_path: Path, name: str, data: bytes, code: str, words: str) -> None:
    (tmp_path / name).write_bytes(data)

    (found,) = sniff.findings(tmp_path / name)

    assert (found.code, found.level) == (code, "error")
    assert found.text.startswith(f"{name} {words}")


def test_next_steps(tmp_path: Path) -> None:
    (tmp_path / "lfs").write_bytes(LFS)
    (tmp_path / "html").write_bytes(HTML)

    assert sniff.findings(tmp_path / "lfs")[0].next == "git lfs pull"
    assert sniff.findings(tmp_path / "html")[0].next == "log in (or accept the licence) and download it again"


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("make", [safetensors_bytes, zip_bytes])
def test_cut_files_are_cut_files_under_any_name(tmp_path: Path, make: Any, keep: float) -> None:
    data = make(tmp_path)
    for name in ("x.safetensors", "x.bin", "x"):
        (tmp_path / name).write_bytes(data[: int(len(data) * keep)])
        assert sniff.sniff(tmp_path / name).kind == "truncated"
        assert [found.code for found in sniff.findings(tmp_path / name)] == ["truncated_file"]


def test_names_that_lie(tmp_path: Path) -> None:
    for name in ("x.bin", "x.pt", "x"):
        (tmp_path / name).write_bytes(safetensors_bytes(tmp_path))
        (found,) = sniff.findings(tmp_path / name)
        assert found.code == "wrong_extension"
        assert found.text == f"{name} is a safetensors file"
        assert found.next == "rename it to .safetensors"
    (tmp_path / "x.safetensors").write_bytes(zip_bytes(tmp_path))
    assert [found.code for found in sniff.findings(tmp_path / "x.safetensors")] == ["wrong_extension"]
    (tmp_path / "x.safetensors").write_text('{"error": "Repository not found"}')
    assert [found.code for found in sniff.findings(tmp_path / "x.safetensors")] == ["wrong_extension"]


def test_for_a_dcp_loader_a_single_file_is_the_wrong_thing(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(tmp_path))
    (tmp_path / "x.pt").write_bytes(zip_bytes(tmp_path))

    assert [found.code for found in sniff.findings(tmp_path / "x.safetensors", loader="dcp")] == ["safetensors_file"]
    assert [found.code for found in sniff.findings(tmp_path / "x.pt", loader="dcp")] == ["torch_save_file"]


def test_a_zip_archive_that_torch_did_not_write(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("readme.txt", "x")

    assert sniff.sniff(tmp_path / "x.bin").words == "a zip archive that torch did not write"


def test_a_genuine_huge_header_is_still_safetensors(tmp_path: Path) -> None:
    length = 126_000_000
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", length) + b"{}")
        file.truncate(8 + length)

    assert sniff.sniff(tmp_path / "x.safetensors") == FileFacts(
        "safetensors", 8 + length, "with a header of 126,000,000 bytes"
    )
    (found,) = sniff.findings(tmp_path / "x.safetensors")
    assert found.code == "header_too_large"


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.symlink(tmp_path / "loop", tmp_path / "loop")

    assert [found.code for found in sniff.findings(tmp_path / "nope")] == ["path_missing"]
    assert [found.code for found in sniff.findings(tmp_path / "loop")] == ["file_unreadable"]
    assert [found.code for found in sniff.findings("a\0b")] == ["file_unreadable"]
    assert [found.code for found in sniff.findings(tmp_path / "pipe")] == ["unknown_format"]
    with pytest.raises(FileNotFoundError):
        sniff.sniff(tmp_path / "nope")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up root's rights in a child process")
def test_a_file_without_permission(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"x")
    (tmp_path / "x.bin").chmod(0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.fchdir(os.open(tmp_path, os.O_RDONLY))
        os.setresuid(65534, 65534, 65534)
        os.write(writer, "".join(found.code for found in sniff.findings("x.bin")).encode())
        os._exit(0)
    os.waitpid(child, 0)

    assert os.read(reader, 100) == b"permission_denied"
    os.close(reader)
    os.close(writer)


def test_a_hostile_name_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[31m\n.bin").write_bytes(b"")

    assert sniff.findings(tmp_path / "a\x1b[31m\n.bin")[0].text == "a\\x1b[31m\\n.bin has no content: 0 bytes"


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", LFS[:40], b"<html", b"{", struct.pack("<Q", 12) + b"{", b"GGUF"]),
    st.binary(max_size=300),
    st.sampled_from(["x", "x.bin", "x.safetensors", "x.json", "x.index.json", "x.distcp"]),
)
@example(b"", b"\x80", "x.bin")
@example(b"PK\x03\x04", b"PK\x05\x06", "x.bin")
@example(b"[" * 100_000, b"", "x.json")
def test_any_bytes_get_facts(tmp_path_factory: Any, start: bytes, data: bytes, name: str) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(start + data)

    facts = sniff.sniff(path)

    assert facts.size == len(start + data)
    assert facts.words
    assert all(found.level == "error" for found in sniff.findings(path))
