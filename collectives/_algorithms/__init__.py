"""Plans: which rank sends which data to which rank, and when, as data that pure functions compute.

`choose.plan_for` picks the plan of one rank for an operation. See `steps` for the parts of a plan.
"""
