"""Who is in the job, and what all of its workers do together."""
