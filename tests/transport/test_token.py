"""Where the job token comes from, what is refused, and races for the file."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rpcdist.errors import ConfigError
from rpcdist.transport.token import MIN_TOKEN_LENGTH, describe_token_source, job_token, token_path

GOOD = "a token that is long enough"
NO_FOLDER = "/proc/rpcdist-has-no-folder"  # works for root, too, whom permissions do not stop


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with an empty home and no token anywhere."""
    for variable in ("RPCDIST_TOKEN", "RPCDIST_TOKEN_FILE", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", NO_FOLDER)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_option_wins_over_the_variable_and_the_variable_over_the_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home / ".config/rpcdist/token", GOOD + " of the file\n")
    assert job_token() == (GOOD + " of the file").encode()
    assert describe_token_source() == f"the token file {home}/.config/rpcdist/token"
    monkeypatch.setenv("RPCDIST_TOKEN", GOOD + " of the variable\n")
    assert job_token() == (GOOD + " of the variable").encode()
    assert "RPCDIST_TOKEN" in describe_token_source()
    assert job_token(GOOD) == GOOD.encode()
    assert "option" in describe_token_source(GOOD) and GOOD not in describe_token_source(GOOD)


def test_the_file_is_made_once_and_private(home: Path) -> None:
    old = os.umask(0)
    try:
        first = job_token()
    finally:
        os.umask(old)
    path = home / ".config/rpcdist/token"
    assert job_token() == first and len(first) >= MIN_TOKEN_LENGTH
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["token"]  # nothing temporary is left


def test_a_mask_that_takes_everything_away_does_no_harm(home: Path) -> None:
    (home / ".config/rpcdist").mkdir(parents=True)
    old = os.umask(0o777)
    try:
        first = job_token()
    finally:
        os.umask(old)
    assert job_token() == first


def test_other_places(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative/is/ignored")
    assert token_path() == home / ".config/rpcdist/token"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "configuration"))
    assert token_path() == home / "configuration/rpcdist/token"
    monkeypatch.setenv("RPCDIST_TOKEN_FILE", str(home / "elsewhere/secret"))
    token = job_token()
    assert (home / "elsewhere/secret").read_bytes().strip() == token


REFUSED: dict[str, tuple[str, str]] = {
    "empty": ("", "empty"),
    "blank": (" \n", "empty"),
    "short": ("x" * (MIN_TOKEN_LENGTH - 1), "15 characters"),
    "huge": ("x" * 5000, "longer than"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("source", ["option", "variable", "file"])
def test_bad_tokens_are_refused_with_advice(
    home: Path, monkeypatch: pytest.MonkeyPatch, kind: str, source: str
) -> None:
    text, says = REFUSED[kind]
    if source == "variable":
        monkeypatch.setenv("RPCDIST_TOKEN", text)
    if source == "file":
        write(home / ".config/rpcdist/token", text)
    with pytest.raises(ConfigError, match=says) as caught:
        job_token(text if source == "option" else None)
    assert "secrets.token_urlsafe" in str(caught.value) and "xxxx" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o620])
def test_a_file_that_others_may_read_or_write_is_refused(home: Path, mode: int) -> None:
    path = write(home / ".config/rpcdist/token", GOOD, mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        job_token()


def test_a_file_of_somebody_else_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / ".config/rpcdist/token", GOOD)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(ConfigError, match="belongs to user id"):
        job_token()


def test_binary_content_is_refused(home: Path) -> None:
    path = write(home / ".config/rpcdist/token", "")
    path.write_bytes(b"\xff\xfe" * 20)
    with pytest.raises(ConfigError, match="does not contain text"):
        job_token()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_what_is_not_a_file_is_refused_and_never_waited_for(
    home: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    make(home / "thing")
    monkeypatch.setenv("RPCDIST_TOKEN_FILE", str(home / "thing"))
    with pytest.raises(ConfigError, match="RPCDIST_TOKEN"):
        job_token()


def test_links_are_followed_and_checked_at_their_end(home: Path) -> None:
    target = write(home / "dotfiles/token", GOOD)
    (home / ".config/rpcdist").mkdir(parents=True)
    (home / ".config/rpcdist/token").symlink_to(target)
    assert job_token() == GOOD.encode()
    target.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod"):
        job_token()


FAULTS = {"full": errno.ENOSPC, "quota": errno.EDQUOT, "read-only": errno.EROFS, "of another user": errno.EACCES}
KINDS = ["none", "file", "/proc", *FAULTS]


def refuse_home(kind: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "none":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for an unknown user id
    elif kind in FAULTS:
        open_file = os.open

        def refuse(path: str, flags: int, *rest: int, **named: int) -> int:
            if flags & os.O_CREAT and Path(path).is_relative_to(home / ".config"):
                raise OSError(FAULTS[kind], os.strerror(FAULTS[kind]))
            return open_file(path, flags, *rest, **named)

        monkeypatch.setattr(os, "open", refuse)
    else:
        write(home / "file", "")
        monkeypatch.setenv("HOME", str(home / "file") if kind == "file" else "/proc")


@pytest.mark.parametrize("kind", KINDS)
def test_a_home_that_takes_no_token_leaves_it_to_a_folder_of_this_machine(
    kind: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = home / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    refuse_home(kind, home, monkeypatch)
    first = job_token()
    path = runtime / "rpcdist/token"
    assert job_token() == first == path.read_text().strip().encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert f"{path}, which only this machine has" in describe_token_source()
    path.parent.chmod(0o755)  # others could have put a file there
    with pytest.raises(ConfigError, match="RPCDIST_TOKEN to the same value"):
        job_token()


@pytest.mark.parametrize("kind", ["full", "quota"])
def test_a_home_that_has_room_again_gets_the_token_of_the_machine(
    kind: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a worker that starts then could not join the job of those that found no room."""
    runtime = home / "runtime"
    runtime.mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        refuse_home(kind, home, patch)
        first = job_token()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert job_token() == first
    assert describe_token_source() == f"the token file {home}/.config/rpcdist/token"
    monkeypatch.setenv("XDG_RUNTIME_DIR", NO_FOLDER)
    assert job_token() == first


@pytest.mark.parametrize("kind", KINDS)
def test_a_machine_that_takes_no_token_anywhere_asks_for_the_variable(
    kind: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_home(kind, home, monkeypatch)
    with pytest.raises(
        ConfigError, match="[Ss]et HOME, or set RPCDIST_TOKEN" if kind == "none" else "Set RPCDIST_TOKEN"
    ):
        job_token()
    assert ("no home" if kind == "none" else "the token file") in describe_token_source()


def test_a_file_that_the_user_names_is_the_only_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    monkeypatch.setenv("RPCDIST_TOKEN_FILE", f"{NO_FOLDER}/token")
    with pytest.raises(ConfigError, match="cannot be stored in /proc"):
        job_token()


def test_an_unset_home_is_looked_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    assert token_path().is_absolute()


def _race(number: int) -> set[bytes]:
    together = threading.Barrier(number, timeout=30)

    def one() -> bytes:
        together.wait()
        return job_token()

    with ThreadPoolExecutor(number) as pool:
        return {future.result(timeout=30) for future in [pool.submit(one) for _ in range(number)]}


def test_threads_that_race_get_one_token(home: Path) -> None:
    for attempt in range(20):
        assert len(_race(8)) == 1
        assert os.listdir(home / ".config/rpcdist") == ["token"], attempt
        (home / ".config/rpcdist/token").unlink()


def test_the_same_on_a_file_system_without_hard_links(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    for _ in range(20):
        assert len(_race(8)) == 1
        (home / ".config/rpcdist/token").unlink()


def test_a_full_disk_leaves_nothing_behind(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ConfigError, match="No space left"):
        job_token()
    assert os.listdir(home / ".config/rpcdist") == []


@pytest.mark.multiproc
def test_processes_that_race_get_one_token(home: Path) -> None:
    program = "import sys; from rpcdist.transport.token import job_token; sys.stdin.read(); print(job_token().decode())"
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in running:  # all imported and waiting; closing their input lets them go
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    tokens = {process.communicate(timeout=60)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert len(tokens) == 1 and tokens == {(home / ".config/rpcdist/token").read_text().strip()}


@pytest.mark.parametrize(
    "regular", ["x" * 32, "ab" * 20, "secret-" * 5 + "sec", "changeme changeme changeme", "112211221122112211"]
)
def test_tokens_that_repeat_a_few_characters_are_refused(regular: str) -> None:
    with pytest.raises(ConfigError, match=r"repeats a few characters.*token_urlsafe") as caught:
        job_token(regular)
    assert regular not in str(caught.value)


def test_random_tokens_are_not_taken_for_regular_ones() -> None:
    for _ in range(200):
        for token in (secrets.token_urlsafe(32), secrets.token_hex(16), secrets.token_urlsafe(12)):
            assert job_token(token) == token.encode()
