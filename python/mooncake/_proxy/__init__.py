"""The proxy in front of prefill and decode servers of vLLM."""

__all__: list[str] = []
