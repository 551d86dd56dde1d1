"""What torch's C++ code sees of ours: works that outlive their Python objects."""
