"""Large payloads of one session on several TCP connections at once, beside the one that carries its messages."""
