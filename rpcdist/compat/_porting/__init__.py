"""`python -m rpcdist port`: changes the imports of a program that was written for torch, and says what is left to do.

`_bindings` knows what the names in a program mean and which name of ours stands for one of torch's; `_rewriting`
decides about each of them, and changes the text.
"""
