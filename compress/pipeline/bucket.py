"""Objects in a bucket of S3-compatible storage, through boto3.

Endpoint, region and credentials are those of boto3's standard configuration: environment variables such as
AWS_ENDPOINT_URL and AWS_ACCESS_KEY_ID, or its configuration files. Messages have neither credentials nor texts of the
server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from compress.core.errors import PipelineError, StoreError

ALLOWED = "s3://BUCKET or s3://BUCKET/PREFIX"
LOCATION = re.compile(
    r"s3://(?!.*/\.{1,2}(?:/|$))(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]{1,62})(?:/(?P<prefix>[A-Za-z0-9._=/-]{0,512}))?"
)
CONNECT_S = 10.0
READ_S = 60.0
MISSING = ("404", "NoSuchKey")
CODES = {
    "NoSuchBucket": ("the bucket does not exist", "create it, or correct --store"),
    "AccessDenied": (
        "access is denied",
        "the credentials need the rights to list the bucket, and to get and put objects",
    ),
    "InvalidAccessKeyId": ("the access key is unknown", "correct AWS_ACCESS_KEY_ID, or the profile"),
    "SignatureDoesNotMatch": ("the secret key is wrong", "correct AWS_SECRET_ACCESS_KEY, or the profile"),
    "ExpiredToken": ("the credentials have expired", "renew them"),
    "RequestTimeTooSkewed": ("the clock of this machine is wrong", "set it"),
}
"""Causes and advice by error code. https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html"""
NAMES = {
    "NoCredentialsError": ("credentials are missing", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "PartialCredentialsError": ("the credentials are incomplete", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "ProfileNotFound": ("the profile does not exist", "correct AWS_PROFILE"),
    "NoRegionError": ("the region is missing", "set AWS_DEFAULT_REGION"),
}
"""The same by boto3's class of errors."""
Transferred = Callable[[int], None]
"""Is called with the number of bytes of each part that was transferred, from several threads."""


class BucketError(Exception):
    """A request that failed, after boto3's repetitions.

    Args:
        what: the cause.
        hint: advice.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what, self.hint = what, hint


class S3Client(Protocol):
    """The functions of boto3's client that are used here."""

    meta: Any

    def get_object(self, **request: Any) -> dict[str, Any]:
        """Return an object; its content is a stream."""

    def put_object(self, **request: Any) -> dict[str, Any]:
        """Create or replace an object."""

    def head_object(self, **request: Any) -> dict[str, Any]:
        """Return the properties of an object."""

    def list_objects_v2(self, **request: Any) -> dict[str, Any]:
        """Return names and sizes of objects, at most 1,000."""

    def upload_file(self, *arguments: Any, **options: Any) -> None:
        """Create an object from a file; a large one in parts."""

    def download_file(self, *arguments: Any, **options: Any) -> None:
        """Write an object to a file; a large one in parts."""


class Bucket:
    """The objects under one prefix of a bucket.

    Args:
        location: s3://BUCKET or s3://BUCKET/PREFIX.
        client: makes the requests; by default a new one.

    Raises:
        PipelineError: the location is invalid, or boto3 is not installed.
        StoreError: boto3's configuration is incomplete.
    """

    def __init__(self, location: str, client: S3Client | None = None) -> None:
        match = LOCATION.fullmatch(location)
        if match is None:  # it is not repeated: somebody may have put credentials into it
            hint = (
                "credentials and endpoint are read from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL"
            )
            raise PipelineError("the location of the store is invalid", where="--store", allowed=ALLOWED, hint=hint)
        self.location = location
        self._bucket = match["bucket"]
        parts = [part for part in (match["prefix"] or "").split("/") if part]
        self._prefix = "".join(f"{part}/" for part in parts)
        self._client = client or new_client()

    def check(self) -> None:
        """Make one cheap request.

        Raises:
            StoreError: the bucket cannot be used.
        """
        try:
            self.sizes("", at_most=1)
        except BucketError as error:
            raise StoreError(
                f"the shared store cannot be used: {error.what}", where=self.location, hint=error.hint
            ) from error

    def get(self, name: str, limit: int) -> bytes | None:
        """Return the content of a small object; None if it does not exist.

        Args:
            name: its name, without the prefix.
            limit: the largest number of bytes. Of a larger object one byte more is returned.

        Raises:
            BucketError: the request failed.
        """
        with self._explained():
            try:
                response = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            except Exception as error:
                if _code(error) in MISSING:
                    return None
                raise
            with response["Body"] as stream:
                return bytes(stream.read(limit + 1))

    def exists(self, name: str) -> bool:
        """Return whether an object exists.

        Raises:
            BucketError: the request failed.
        """
        with self._explained():
            try:
                self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)
            except Exception as error:
                if _code(error) in MISSING:
                    return False
                raise
            return True

    def sizes(self, folder: str, at_most: int = 1000) -> dict[str, int]:
        """Return the bytes of the objects whose names begin with `folder`, by the rest of their names.

        Raises:
            BucketError: the request failed.
        """
        beginning = self._prefix + folder
        with self._explained():
            response = self._client.list_objects_v2(Bucket=self._bucket, Prefix=beginning, MaxKeys=at_most)
            return {row["Key"].removeprefix(beginning): int(row["Size"]) for row in response.get("Contents", ())}

    def put(self, name: str, content: bytes) -> None:
        """Create or replace a small object.

        Raises:
            BucketError: the request failed.
        """
        with self._explained():
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=content)

    def upload(self, path: Path, name: str, transferred: Transferred) -> None:
        """Create or replace an object with the content of a file.

        Raises:
            BucketError: the request failed.
        """
        with self._explained():
            self._client.upload_file(str(path), self._bucket, self._prefix + name, Callback=transferred)

    def download(self, name: str, path: Path, transferred: Transferred) -> None:
        """Write an object to a file.

        Raises:
            BucketError: the request failed.
            OSError: the file cannot be written.
        """
        with self._explained():
            self._client.download_file(self._bucket, self._prefix + name, str(path), Callback=transferred)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert errors of boto3."""
        try:
            yield
        except Exception as error:
            if (explained := _explained(error, self._client.meta.endpoint_url)) is None:
                raise
            raise explained from error


def new_client() -> S3Client:
    """Return boto3's client.

    Raises:
        PipelineError: boto3 is not installed.
        StoreError: its configuration is incomplete.
    """
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise PipelineError("--store needs boto3", where="--store", hint="pip install 'boto3~=1.44'") from error
    # Files are verified with SHA-256 here. Some S3-compatible servers do not know the newer checksums.
    settings = Config(
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        retries={"mode": "standard"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        return cast(S3Client, boto3.session.Session().client("s3", config=settings))
    except Exception as error:
        explained = _explained(error, None)
        if explained is None and not isinstance(error, ValueError):  # an invalid endpoint
            raise
        what, hint = (explained.what, explained.hint) if explained else ("the endpoint is invalid", "")
        raise StoreError(
            f"the shared store cannot be used: {what}", where="--store", hint=hint or "correct AWS_ENDPOINT_URL"
        ) from error


def _explained(error: BaseException, endpoint: str | None) -> BucketError | None:
    """Return what an error of boto3 means; None if it is not one."""
    name = type(error).__name__
    if not type(error).__module__.startswith(("boto3", "botocore", "s3transfer", "urllib3")):
        return None
    code = _code(error) or _code(error.__context__)  # uploads raise another error while they handle this one
    if code:
        what, hint = CODES.get(code, (f"the server answers {code}", ""))
    elif name in NAMES:
        what, hint = NAMES[name]
    else:
        what, hint = f"the server at {_address(endpoint)} cannot be reached ({name})", "correct AWS_ENDPOINT_URL"
    return BucketError(what, hint)


def _code(error: BaseException | None) -> str:
    """Return the error code of the server; "" if there is none."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return ""
    code = str(response.get("Error", {}).get("Code", ""))
    if code == "403":  # an answer without content
        return "AccessDenied"
    return code if re.fullmatch(r"[A-Za-z0-9.]{0,64}", code) else "an error"


def _address(endpoint: str | None) -> str:
    """Return host and port of an endpoint, without a name and a password in it."""
    parts = urlsplit(endpoint or "")
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:  # no number from 0 to 65535
        port = ""
    return f"{parts.hostname}{port}" if parts.hostname else "AWS_ENDPOINT_URL"
