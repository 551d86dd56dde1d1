"""Operations of a group as data, and how the tensors of a call become one."""
