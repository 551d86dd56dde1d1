"""TLS between the processes of a job: certificates made from the job token, or from files, and the policy."""
