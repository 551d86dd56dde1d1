"""Puts a link to `rpcdist/` into the site-packages of this Python, so that type checkers find an editable install.

setuptools installs a package whose parts lie in several folders by an import hook, which mypy and pyright cannot see:
to them it would not be installed. Python takes the link, too, which leads to the same files.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    link = Path(sysconfig.get_path("purelib")) / "rpcdist"
    if link.is_symlink():
        link.unlink()  # it may lead to where the repository lay before
    elif link.exists():
        raise SystemExit(f"{link} is not a link: uninstall the package of that name first (pip uninstall rpcdist)")
    link.symlink_to(ROOT / "rpcdist", target_is_directory=True)


if __name__ == "__main__":
    main()
