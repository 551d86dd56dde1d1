"""TLS between the processes of a job: certificates that the job token vouches for, and where they are used."""

__all__: list[str] = []
