"""Compares the public names with the site that `make docs` has built: each has to be on a page of docs/reference/.

It lists the versions of the site, too: each has a folder, so that an older one stays beside the newer ones.

Public are the names in `__all__` of the modules that those pages list, without a leading underscore; torch's own
classes and functions, which some modules offer under torch's names, are listed on the page by hand.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["REFERENCE", "VERSION", "documented_modules", "is_of_torch", "list_versions", "public_names"]

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
SITE = ROOT / "out" / "site"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
INVENTORY = SITE / VERSION / "objects.inv"
WITHOUT_IMPORT = {"rpcdist.ray": "Ray is not installed here; a name that it lacks fails the build all the same"}


def documented_modules() -> dict[str, Path]:
    """The modules of the reference, and the page of each."""
    pages = sorted(REFERENCE.glob("*.md"))
    listed = {name: page for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)}
    return {name: page for name, page in listed.items() if _is_module(name)}


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def public_names(module: str) -> dict[str, Any]:
    """The names that a module offers, without modules, which have a place of their own."""
    found = importlib.import_module(module)
    values = {name: getattr(found, name) for name in found.__all__ if not name.startswith("_")}
    return {name: value for name, value in values.items() if not isinstance(value, ModuleType)}


def is_of_torch(value: Any) -> bool:
    """Whether a class or function is torch's own."""
    home = getattr(value, "__module__", None) or type(value).__module__
    return home.split(".")[0] in ("torch", "torch._C")


def _home(name: str, value: Any) -> str:
    """Where a class or function is defined, under which the site may have it as well."""
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', name)}"


def list_versions(site: Path) -> list[str]:
    """Lists the versions that were built, the newest first, for the selector of the pages, and leads to the newest."""
    built = sorted(site.glob("*/objects.inv"), key=lambda path: [*map(int, path.parent.name.split("."))], reverse=True)
    versions = [path.parent.name for path in built]
    entries = [{"version": name, "title": name, "aliases": ["latest"] * (name == versions[0])} for name in versions]
    (site / "versions.json").write_text(json.dumps(entries))
    (site / "index.html").write_text(
        f'<!doctype html><title>rpcdist</title><meta http-equiv="refresh" content="0; url={versions[0]}/index.html">\n'
    )
    return versions


def main() -> int:
    """Names what is missing; 1 if something is."""
    inventory = zlib.decompress(INVENTORY.read_bytes().partition(b"zlib.\n")[2]).decode()
    shown = {line.split(" ")[0] for line in inventory.splitlines()}
    missing = [
        f"{module}.{name}"
        for module in documented_modules().keys() - WITHOUT_IMPORT.keys()
        for name, value in public_names(module).items()
        if not ({f"{module}.{name}", _home(name, value)} & shown) and not is_of_torch(value)
    ]
    for name in sorted(missing):
        print(f"not on any page of {REFERENCE.relative_to(ROOT)}: {name}", file=sys.stderr)
    print(f"{len(shown)} names are on the site, versions {', '.join(list_versions(SITE))}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
