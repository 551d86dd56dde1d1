"""Parts of ours that torch's C++ code and its compiler meet: works, functional collectives, untraced methods."""
