"""`python -m rpcdist doctor`: finds why the workers of a job cannot reach each other, and how to fix it."""
