"""Stores: a table of keys through which the processes of a job find each other. `rpcdist.collectives` exports them."""
