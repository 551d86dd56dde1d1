"""The list of workers in the job, and what all of its workers do together: gather, recover, shut down."""
