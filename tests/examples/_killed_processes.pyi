from examples._killed_processes import *  # mypy finds here what the examples import from the file beside them  # noqa: F403
