"""Tokens as they lie in files: one secret a file, for its owner's eyes only."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.limits import TOKEN_BYTES_MAX, TOKEN_BYTES_MIN

log = logging.getLogger(__name__)

_OTHERS_RIGHTS: Final = stat.S_IRWXG | stat.S_IRWXO
_RANDOM_BYTES: Final = 32
_FILE_BYTES_MAX: Final = 2 * TOKEN_BYTES_MAX


def read_token(path: str | Path) -> bytes:
    """The secret in a file, without the white space around it. Rights that are too wide are logged.

    Raises:
        InvalidRequest: It cannot be read, or is too short to be a secret, or too long for a HELLO.
    """
    try:
        with open(path, "rb") as file:
            token = file.read(_FILE_BYTES_MAX).strip()
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        raise InvalidRequest(f"token file {path} cannot be read: {error.strerror}") from None
    if not TOKEN_BYTES_MIN <= len(token) <= TOKEN_BYTES_MAX:
        raise InvalidRequest(
            f"token file {path} holds {len(token)} bytes; a token has {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX}: "
            "`kvstore tenants new-token FILE` draws one"
        )
    if mode & _OTHERS_RIGHTS:
        log.warning("token file %s has mode %04o: others than its owner may use it; chmod 600 it", path, mode)
    return token


def write_new_token(path: str | Path) -> bytes:
    """Draw a token and keep it in a new file that only its owner reads. Raises InvalidRequest when there is one."""
    token = secrets.token_urlsafe(_RANDOM_BYTES).encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise InvalidRequest(f"{path} exists already and is left as it is; name another file") from None
    except OSError as error:
        raise InvalidRequest(f"token file {path} cannot be written: {error.strerror}") from None
    with open(descriptor, "wb") as file:
        file.write(token + b"\n")
    return token
