"""Operations of a group as data, and how a call's tensors become one."""
