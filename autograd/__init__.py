"""Distributed autograd. It is installed as `rpcdist.autograd`."""

if __name__ != "rpcdist.autograd":
    raise ImportError(
        "this folder is installed as rpcdist.autograd; write `import rpcdist.autograd`, and take the repository's root "
        "off sys.path (run your script from another folder, or install the project with `pip install -e .`)"
    )
