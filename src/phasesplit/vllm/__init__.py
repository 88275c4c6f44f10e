"""A KV connector for vLLM: the product's own transfer between vLLM's machines, layer by layer.

Only `connector` imports vLLM, only `connector` and `device_blocks` import torch. vLLM calls the interface experimental:
`connector.VLLM_VERSION` says which version this package is written and tested against.
"""
