"""The engine: the only imports of vllm. An upgrade of vLLM is this folder's work."""
