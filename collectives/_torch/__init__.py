"""What torch's C++ code and its compiler meet of ours: works, functional collectives, methods that are not traced."""
