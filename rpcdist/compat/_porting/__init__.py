"""`python -m rpcdist port`: changes the imports of a program that was written for torch, and says what is left to do.

`_names` knows which name of ours stands for one of torch's, `_bindings` what the names in a program mean, `_program`
decides about each of them, and `_edits` changes the text, which otherwise stays as it is, comments and all.
"""
