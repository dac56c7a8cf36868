"""Places for archives: a directory, or S3-compatible storage. Everything here blocks; call it on a thread.

S3 by boto3, the vendor's own library: it alone finds all of the vendor's credentials (the environment, files, roles of
machines and pods) and `AWS_ENDPOINT_URL`, so no setting of ours holds any.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import IO, Any, Protocol

from ..errors import ConfigError, StoreUnavailable
from ..locks import to_drive
from ..settings import S3

INSTALL = "an archive needs pip install 'cli-session-proxy[archive]'"
# Seconds. A server confirms a part of an object within the longer one.
CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 60.0
BLOCK = 1024 * 1024


class Place(Protocol):
    """Where objects are stored by name. `str` of it says where that is."""

    def put(self, name: str, source: IO[bytes]) -> None:
        """Store the whole file, atomically; durable when this returns."""

    def fetch(self, name: str, into: IO[bytes]) -> bool:
        """Write the object into the file. False where there is none."""


def place_at(where: str) -> Place:
    """Raises `ConfigError`."""
    if not where.startswith(S3):
        if "://" in where:
            raise ConfigError("an archive goes to a directory, or to s3://bucket/prefix")
        return Directory(Path(os.path.abspath(Path(where).expanduser())))
    bucket, _, prefix = where.removeprefix(S3).partition("/")
    if not bucket:
        raise ConfigError(f"{where} names no bucket: write s3://bucket/prefix")
    return Bucket(bucket, prefix.strip("/"))


class Directory:
    """Files in one folder (0600). The folder must exist: else files would go beside an unmounted disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    def put(self, name: str, source: IO[bytes]) -> None:
        fresh = self._folder / f".{name}.{secrets.token_hex(8)}.part"
        try:
            source.seek(0)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                shutil.copyfileobj(source, file, BLOCK)
                file.flush()
                to_drive(file.fileno())
            fresh.replace(self._folder / name)
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as exc:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise StoreUnavailable(
                f"cannot write {self._folder} ({exc.strerror}): check that it exists and is not full"
            ) from exc

    def fetch(self, name: str, into: IO[bytes]) -> bool:
        try:
            with open(self._folder / name, "rb") as file:
                shutil.copyfileobj(file, into, BLOCK)
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise StoreUnavailable(f"cannot read {self._folder / name} ({exc.strerror})") from exc
        return True


class Bucket:
    """Objects below a prefix. An interrupted upload leaves parts that only the bucket's lifecycle rules remove."""

    def __init__(self, bucket: str, prefix: str) -> None:
        try:
            import boto3.session  # noqa: PLC0415 - an extra, and 0.2 s
            import botocore.config  # noqa: PLC0415
            from boto3.exceptions import Boto3Error  # noqa: PLC0415
            from boto3.s3.transfer import TransferConfig  # noqa: PLC0415
            from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
        except ImportError:
            raise ConfigError(INSTALL) from None
        self._bucket, self._prefix = bucket, prefix
        self._faults: tuple[type[Exception], ...] = (Boto3Error, BotoCoreError, ClientError)
        # One part in memory at a time.
        self._transfer = TransferConfig(use_threads=False)
        timeouts = botocore.config.Config(
            connect_timeout=CONNECT_TIMEOUT,
            read_timeout=READ_TIMEOUT,
            retries={"mode": "standard", "total_max_attempts": 4},
            # Else botocore (1.44) fails at a server's error that has a checksum. What is read here is authenticated.
            response_checksum_validation="when_required",
        )
        try:
            # A new session: the library's default one keeps the first credentials that it found.
            self._client: Any = boto3.session.Session().client("s3", config=timeouts)
        except self._faults as exc:  # e.g. a missing profile, an unreadable file
            raise ConfigError(f"{self}: {type(exc).__name__}: see the AWS_ variables and ~/.aws") from exc

    def __str__(self) -> str:
        return f"{S3}{self._bucket}/{self._prefix}".rstrip("/")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def put(self, name: str, source: IO[bytes]) -> None:
        source.seek(0)
        try:
            self._client.upload_fileobj(source, self._bucket, self._key(name), Config=self._transfer)
        except self._faults as exc:
            raise self._unavailable("does not take an object", exc) from exc

    def fetch(self, name: str, into: IO[bytes]) -> bool:
        try:
            body = self._client.get_object(Bucket=self._bucket, Key=self._key(name))["Body"]
            with contextlib.closing(body):
                shutil.copyfileobj(body, into, BLOCK)
        except self._faults as exc:
            if _code(exc) == "NoSuchKey":
                return False
            raise self._unavailable("does not give an object", exc) from exc
        except OSError as exc:
            raise StoreUnavailable(f"{self}: an object cannot be kept here ({exc.strerror})") from exc
        return True

    def _unavailable(self, failure: str, exc: Exception) -> StoreUnavailable:
        """Only error codes are quoted: a server's text may contain anything, secrets too."""
        return StoreUnavailable(f"{self} {failure} ({_code(exc)}): see the AWS_ variables, the bucket and its rights")


def _code(exc: BaseException) -> str:
    """The server's error code, also from a wrapped error; else the error's name."""
    response = getattr(exc, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", "unknown"))[:60]
    wrapped = exc.__cause__ or exc.__context__
    return _code(wrapped) if wrapped is not None and type(exc).__module__ == "boto3.exceptions" else type(exc).__name__
