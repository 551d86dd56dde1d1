"""The job token: the secret that all processes of a job share, and where it comes from.

In this order: the option given in code, the one that an engine brought, the environment variable `RPCDIST_TOKEN`, and a
file of the user's own, which is created with a random token where there is none. So one machine, and a cluster with a
shared home, need no set-up.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import Final

from rpcdist.errors import ConfigError
from rpcdist.private_files import why_not_private

TOKEN_VARIABLE: Final = "RPCDIST_TOKEN"
FILE_VARIABLE: Final = "RPCDIST_TOKEN_FILE"
MIN_TOKEN_LENGTH: Final = 16
"""A recorded handshake can be used to try tokens offline, so short ones are refused; 16 random characters are safe."""

_BROUGHT: Final = "the token that the engine brought"
_MAX_TOKEN_LENGTH: Final = 4096
_MIN_DIFFERENT: Final = 6  # characters; of 16 random hexadecimal digits fewer are different once in 2000 times
_ADVICE: Final = "Make a good one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
# What a file system answers that has no hard links (vfat, some network and container mounts).
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


_brought: list[str] = []
"""What `bring_job_token` was given last: of this process, and not in its environment, which others can read."""


def bring_job_token(token: str) -> None:
    """Sets the token of this process: an engine that starts it has another way to hand it over than its environment.

    Raises:
        ConfigError: as `job_token`.
    """
    _checked(token, _BROUGHT)
    _brought[:] = [token]


def job_token(explicit: str | None = None) -> bytes:
    """Returns the job token, and makes the token file if nothing else gives one.

    Args:
        explicit: the token from an option, or None.

    Returns:
        The token as UTF-8, without white space around it; the same from every source.

    Raises:
        ConfigError: the token is empty, short or regular, or the file is not safe, or cannot be read or made; the
            text says how to mend it. It never contains the token.
    """
    if explicit is not None:
        return _checked(explicit, "the token option")
    if _brought:
        return _checked(_brought[0], _BROUGHT)
    from_environment = os.environ.get(TOKEN_VARIABLE)
    if from_environment is not None:
        return _checked(from_environment, f"the environment variable {TOKEN_VARIABLE}")
    return _token_of_file(token_path())


def describe_token_source(explicit: str | None = None) -> str:
    """Says where `job_token` takes the token from, for error messages; never contains the token, never raises."""
    if explicit is not None:
        return "the token given as an option"
    if _brought:
        return _BROUGHT
    if TOKEN_VARIABLE in os.environ:
        return f"the token in the environment variable {TOKEN_VARIABLE}"
    try:
        return f"the token file {token_path()}"
    except ConfigError:
        return f"no token: {TOKEN_VARIABLE} is not set, and there is no home directory for a token file"


def token_path() -> Path:
    """Where the token file lies: `RPCDIST_TOKEN_FILE`, or `rpcdist/token` in the user's configuration directory.

    Raises:
        ConfigError: the user has no home directory.
    """
    chosen = os.environ.get(FILE_VARIABLE)
    if chosen:
        return Path(chosen)
    config = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(config):  # the XDG specification: relative ones are to be ignored
        return Path(config, "rpcdist", "token")
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise ConfigError(
            f"there is no home directory to keep the job token in. Set HOME, or set {TOKEN_VARIABLE} to the same value "
            f"in every process of the job. {_ADVICE}"
        )
    return Path(home, ".config", "rpcdist", "token")


def _checked(text: str, source: str) -> bytes:
    token = text.strip()
    if not token:
        raise ConfigError(f"{source} is set, but empty. Give every process of the job the same token. {_ADVICE}")
    if len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"the token in {source} has {len(token)} characters; {MIN_TOKEN_LENGTH} are needed, or it could be "
            f"guessed. {_ADVICE}"
        )
    if len(token) > _MAX_TOKEN_LENGTH:
        raise ConfigError(f"the token in {source} is longer than {_MAX_TOKEN_LENGTH} characters. {_ADVICE}")
    if len(set(token)) < _MIN_DIFFERENT or _is_repetition(token):
        raise ConfigError(
            f"the token in {source} repeats a few characters, and could be guessed: the keys of the job's TLS are made "
            f"from it. {_ADVICE}"
        )
    return token.encode("utf-8", "surrogateescape")  # environment bytes that are not UTF-8 come back as they were


def _is_repetition(token: str) -> bool:
    """Whether a part shorter than a token may be makes up all of it, twice or more often."""
    longest = min(MIN_TOKEN_LENGTH - 1, len(token) // 2)
    return any(token[length:] == token[:-length] for length in range(1, longest + 1))


def _token_of_file(path: Path) -> bytes:
    try:
        token = _read(path)
        if token is None:
            _create(path)
            token = _read(path)
    except OSError as exc:
        raise ConfigError(
            f"the job token cannot be kept in {path} ({exc.strerror or exc}). Set {TOKEN_VARIABLE} to the same value "
            f"in every process of the job, or {FILE_VARIABLE} to a file that you may write. {_ADVICE}"
        ) from exc
    if token is None:
        raise ConfigError(
            f"the token file {path} vanished while it was read. Set {TOKEN_VARIABLE} instead, or try again."
        )
    return token


def _read(path: Path) -> bytes | None:
    """The token in the file; None if there is no file."""
    try:
        # Not blocking: a named pipe in its place must not hang us.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        _check_private(os.fstat(descriptor), path)  # the opened file's, so that nobody can swap it between
        content = file.read(_MAX_TOKEN_LENGTH + 2)
    try:
        return _checked(content.decode(), f"the token file {path}")
    except UnicodeDecodeError as exc:
        raise ConfigError(f"the token file {path} does not contain text. Remove it, and a new one is made.") from exc


def _check_private(status: os.stat_result, path: Path) -> None:
    why = why_not_private(status)
    if why is not None:
        raise ConfigError(
            f"the token file {path} {why}, so others could know or change the secret. Run chmod 600 {path}, or set "
            f"{FILE_VARIABLE} to a file of your own, or {TOKEN_VARIABLE}."
        )


def _create(path: Path) -> None:
    """Makes the file with a random token, whole and private from its first moment; a file already there stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # whatever the umask took away
            file.write(secrets.token_urlsafe(32).encode() + b"\n")
            file.flush()
            os.fsync(descriptor)
        _publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _publish(temporary: Path, path: Path) -> None:
    """Gives the finished file its name, unless somebody else was faster: everybody then reads the winner's."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        _rename_under_lock(temporary, path)


def _rename_under_lock(temporary: Path, path: Path) -> None:
    """The same without hard links: the directory is locked, for renaming alone would replace another's file."""
    import fcntl  # not on Windows, where os.link works

    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # held for one rename, and freed by the kernel if its holder dies
        if not path.exists():
            os.rename(temporary, path)
    finally:
        os.close(directory)
