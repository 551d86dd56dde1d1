"""Collectives and the store. It is installed as `rpcdist.collectives`."""

if __name__ != "rpcdist.collectives":
    raise ImportError(
        "this folder is installed as rpcdist.collectives; write `import rpcdist.collectives`, and take the repository's root "
        "off sys.path (run your script from another folder, or install the project with `pip install -e .`)"
    )
