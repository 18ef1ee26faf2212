"""The parts of `mooncake.mooncake_connector_v1`, which hands KV blocks from one vLLM to another."""

__all__: list[str] = []
