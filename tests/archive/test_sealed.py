"""Encryption: nothing but the whole of it comes back, in bounded memory, and no key is ever shown."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cli_session_proxy.archive.sealed import MAGIC, ArchiveKey, UnnamedFile
from cli_session_proxy.errors import ConfigError, InvalidRequest, StoreUnavailable
from cli_session_proxy.settings import Settings

from .conftest import new_identity, write_key

MANY = 32 * 1024 * 1024


def key_of(path: Path) -> ArchiveKey:
    return ArchiveKey.of(Settings(archive_key_file=path))


def sealed(key: ArchiveKey, data: bytes) -> bytes:
    into = io.BytesIO()
    with key.sealing(into) as out:
        out.write(data)
    return into.getvalue()


def opened(key: ArchiveKey, data: bytes) -> bytes:
    with key.opened(io.BytesIO(data), "it") as plain:
        return plain.read()


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> ArchiveKey:
    return key_of(write_key(tmp_path_factory.mktemp("keys") / "key"))


@hypothesis_settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=200_000), at=st.floats(0, 1, exclude_max=True), cut=st.booleans())
def test_what_was_sealed_comes_back_whole_or_not_at_all(key: ArchiveKey, data: bytes, at: float, cut: bool) -> None:
    whole = sealed(key, data)
    assert whole.startswith(MAGIC)
    assert opened(key, whole) == data
    place = int(at * len(whole))
    changed = whole[:place] if cut else whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    with pytest.raises(InvalidRequest, match="cannot be decrypted"):
        opened(key, changed)


def test_another_key_opens_nothing_and_a_former_one_still_does(tmp_path: Path) -> None:
    former, newer = new_identity(), new_identity()
    old = sealed(key_of(write_key(tmp_path / "former", former)), b"said")
    with pytest.raises(InvalidRequest, match="archive_key_file"):
        opened(key_of(write_key(tmp_path / "newer", newer)), old)
    both = key_of(write_key(tmp_path / "both", newer, former))
    assert opened(both, old) == b"said"
    with pytest.raises(InvalidRequest):  # the first one encrypts
        opened(key_of(tmp_path / "former"), sealed(both, b"said"))


def test_a_reader_that_stops_early_is_told_its_own_error(key: ArchiveKey) -> None:
    whole = sealed(key, bytes(MANY // 8))

    def read() -> None:
        with key.opened(io.BytesIO(whole), "it") as plain:
            plain.read(10)
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        read()


def test_a_disk_that_is_full_is_an_error_of_the_writer(key: ArchiveKey) -> None:
    def fill() -> None:
        with open("/dev/full", "wb", buffering=0) as full, key.sealing(full) as out:
            for _ in range(64):
                out.write(bytes(65536))

    with pytest.raises(StoreUnavailable, match="space"):
        fill()


def test_memory_does_not_grow_with_what_is_sealed(key: ArchiveKey, tmp_path: Path) -> None:
    tracemalloc.start()
    with UnnamedFile(tmp_path, "it") as file:
        with key.sealing(file.file) as out:
            for _ in range(MANY // 65536):
                out.write(bytes(65536))
        with file.open() as again, key.opened(again, "it") as plain:
            assert sum(iter(lambda: len(plain.read(65536)), 0)) == MANY
        assert [path for path in tmp_path.iterdir() if path.is_file()] == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MANY / 16


def test_readers_of_a_file_without_a_name_have_places_of_their_own(tmp_path: Path) -> None:
    with UnnamedFile(tmp_path, "it") as kept:
        kept.file.write(b"one\ntwo\nthree\n")
        with kept.open() as first, kept.open() as second:
            assert first.readline() == b"one\n"
            assert second.read() == b"one\ntwo\nthree\n"
            assert (first.tell(), first.readline()) == (4, b"two\n")
            second.seek(4)
            assert second.readline() == b"two\n"


@pytest.mark.parametrize("said", ["", "# only a comment\n", "AGE-SECRET-KEY-1WRONG\n", "age1notasecret\n"])
def test_a_file_that_holds_no_identity_is_a_config_error_without_its_words(tmp_path: Path, said: str) -> None:
    path = tmp_path / "key"
    path.write_text(said)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="archive_key_file") as raised:
        key_of(path)
    assert "WRONG" not in raised.value.message


def test_a_key_that_others_can_read_or_that_is_not_named_is_refused(tmp_path: Path) -> None:
    path = write_key(tmp_path / "key")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        key_of(path)
    with pytest.raises(ConfigError, match="archive_key_file is not set"):
        ArchiveKey.of(Settings())
    assert Settings(archive_key_file=path).secret_files()[path] == "archive_key_file"
