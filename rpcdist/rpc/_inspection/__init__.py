"""Collects facts about a worker, answers questions about them, and records how calls ended."""
