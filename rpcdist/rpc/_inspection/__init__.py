"""Collects facts about a worker, answers those who ask, and remembers how calls ended."""
