"""TLS between the processes of a job: certificates, the job token's or one's own, and where they are used."""

__all__: list[str] = []
