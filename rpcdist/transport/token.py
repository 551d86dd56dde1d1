"""The job token: the secret that all processes of a job share, and its sources.

The sources, in this order: the option given in code, the token that an engine set, the environment variable
`RPCDIST_TOKEN`, and a file of the user, which is created with a random token if it is missing: in the home directory,
or, if that takes no file (containers, full disks), in a directory of this machine. So a single machine, or a cluster
with a shared home directory, needs no set-up. A home directory that takes files later gets the token of the machine
that first finds it so, whose older processes then agree with the new ones.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from rpcdist.errors import ConfigError
from rpcdist.private_files import runtime_folder, why_not_private

TOKEN_VARIABLE: Final = "RPCDIST_TOKEN"
FILE_VARIABLE: Final = "RPCDIST_TOKEN_FILE"
MIN_TOKEN_LENGTH: Final = 16
"""With a recorded handshake, tokens can be tried offline, so short ones are refused; 16 random characters are safe."""

_CHOSEN: Final = "the token that the engine set"
_MAX_TOKEN_LENGTH: Final = 4096
_MIN_DIFFERENT: Final = 6  # characters; 16 random hexadecimal digits have fewer different ones once in 2000 times
_ADVICE: Final = "Make a good one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
# Errors of file systems without hard links (vfat, some network and container mounts).
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
# Errors of home directories that this user cannot write to.
_NOT_WRITABLE: Final = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT}
)


_chosen: list[str] = []
"""The last token given to `set_job_token`; not in the environment of this process, which other processes can read."""


def set_job_token(token: str) -> None:
    """Sets the token of this process, for engines that do not pass it in the environment.

    Raises:
        ConfigError: see `job_token`.
    """
    _checked(token, _CHOSEN)
    _chosen[:] = [token]


def job_token(explicit: str | None = None) -> bytes:
    """Returns the job token, and creates the token file if there is no other source.

    Args:
        explicit: the token from an option, or None.

    Returns:
        The token as UTF-8, without surrounding white space.

    Raises:
        ConfigError: the token is empty, short or repetitive, or the file is not private, or cannot be read or created.
            The text says how to fix that, and never contains the token.
    """
    if explicit is not None:
        return _checked(explicit, "the token option")
    if _chosen:
        return _checked(_chosen[0], _CHOSEN)
    from_environment = os.environ.get(TOKEN_VARIABLE)
    if from_environment is not None:
        return _checked(from_environment, f"the environment variable {TOKEN_VARIABLE}")
    return _token_of_user()


def describe_token_source(explicit: str | None = None) -> str:
    """The source from which `job_token` takes the token, for error messages; never contains the token, never raises."""
    if explicit is not None:
        return "the token given as an option"
    if _chosen:
        return _CHOSEN
    if TOKEN_VARIABLE in os.environ:
        return f"the token in the environment variable {TOKEN_VARIABLE}"
    try:
        path, missing = str(token_path()), ""
    except ConfigError:
        path = "a home directory"
        missing = f"no token: {TOKEN_VARIABLE} is not set, and there is no home directory for a token file"
    if os.access(path, os.R_OK) or (machine := _path_of_machine()) is None or not machine.exists():
        return missing or f"the token file {path}"
    return f"the token file {machine}, which only this machine has, since {path} cannot be read"


def token_path() -> Path:
    """The path of the token file: `RPCDIST_TOKEN_FILE`, or `rpcdist/token` in the user's configuration directory.

    Raises:
        ConfigError: the user has no home directory.
    """
    chosen = os.environ.get(FILE_VARIABLE)
    if chosen:
        return Path(chosen)
    config = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(config):  # the XDG specification requires relative paths to be ignored
        return Path(config, "rpcdist", "token")
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise ConfigError(
            f"there is no home directory for the job token. Set HOME, or set {TOKEN_VARIABLE} to the same value "
            f"in every process of the job. {_ADVICE}"
        ) from FileNotFoundError(errno.ENOENT, home)
    return Path(home, ".config", "rpcdist", "token")


def _checked(text: str, source: str) -> bytes:
    token = text.strip()
    if not token:
        raise ConfigError(f"{source} is set but empty. Give every process of the job the same token. {_ADVICE}")
    if len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"the token in {source} has {len(token)} characters, so it could be guessed; it needs at least "
            f"{MIN_TOKEN_LENGTH}. {_ADVICE}"
        )
    if len(token) > _MAX_TOKEN_LENGTH:
        raise ConfigError(f"the token in {source} is longer than {_MAX_TOKEN_LENGTH} characters. {_ADVICE}")
    if len(set(token)) < _MIN_DIFFERENT or _is_repetition(token):
        raise ConfigError(
            f"the token in {source} repeats a few characters, so it could be guessed, and the TLS keys are derived "
            f"from it. {_ADVICE}"
        )
    return token.encode("utf-8", "surrogateescape")  # restores environment bytes that are not UTF-8


def _is_repetition(token: str) -> bool:
    """Whether the text consists of repetitions of a part that is too short for a token."""
    longest = min(MIN_TOKEN_LENGTH - 1, len(token) // 2)
    return any(token[length:] == token[:-length] for length in range(1, longest + 1))


def _token_of_user() -> bytes:
    try:
        return _token_of_file(token_path())
    except ConfigError as exc:
        path = _path_of_machine(create=True) if getattr(exc.__cause__, "errno", None) in _NOT_WRITABLE else None
        if path is None:
            raise
        return _token_of_file(path)


def _path_of_machine(create: bool = False) -> Path | None:
    """The token file if the home directory is not writable; None for no folder, or if the user has named a file."""
    if os.environ.get(FILE_VARIABLE):
        return None
    try:
        return Path(runtime_folder(create), "token")
    except OSError:
        return None


def _token_of_file(path: Path) -> bytes:
    try:
        token = _read(path)
        if token is None:
            machine = _path_of_machine()
            _create(path, (None if machine is None else _read(machine)) or secrets.token_urlsafe(32).encode())
            token = _read(path)
    except OSError as exc:
        raise ConfigError(
            f"the job token cannot be stored in {path} ({exc.strerror or exc}). Set {TOKEN_VARIABLE} to the same value "
            f"in every process of the job, or {FILE_VARIABLE} to a file that you can write. {_ADVICE}"
        ) from exc
    if token is None:
        text = f"the token file {path} disappeared while it was read. Set {TOKEN_VARIABLE} instead, or try again."
        raise ConfigError(text)
    return token


def _read(path: Path) -> bytes | None:
    """The token in the file; None if there is no file."""
    try:
        # Not blocking: a named pipe in place of the file must not hang this process.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        _check_private(os.fstat(descriptor), path)  # the opened file, which nobody can exchange meanwhile
        content = file.read(_MAX_TOKEN_LENGTH + 2)
    try:
        return _checked(content.decode(), f"the token file {path}")
    except UnicodeDecodeError as exc:
        why = f"the token file {path} does not contain text. Remove it, so that rpcdist creates a new one."
        raise ConfigError(why) from exc


def _check_private(status: os.stat_result, path: Path) -> None:
    why = why_not_private(status)
    if why is not None:
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        raise ConfigError(
            f"the token file {path} {why}, so other users could read or change the secret. "
            f"{f'Run chmod 600 {path}, or set' if is_own else 'Set'} {FILE_VARIABLE} to a file of your own, or "
            f"{TOKEN_VARIABLE}."
        )


def _create(path: Path, token: bytes) -> None:
    """Creates the file, complete and private from the start; an existing file stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # independent of the umask
            file.write(token + b"\n")
            file.flush()
            os.fsync(descriptor)
        _publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _publish(temporary: Path, path: Path) -> None:
    """Gives the finished file its name, unless another process was faster: then all read that process's file."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        _rename_under_lock(temporary, path)


def _rename_under_lock(temporary: Path, path: Path) -> None:
    """Does the same without hard links, with a lock on the directory: a rename alone would replace another's file."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # held for one rename, and freed by the kernel if its holder dies
        if not path.exists():
            os.rename(temporary, path)
    finally:
        os.close(directory)
