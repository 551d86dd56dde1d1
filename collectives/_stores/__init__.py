"""Stores: tables of keys through which the processes of a job find each other; exported by `rpcdist.collectives`."""
