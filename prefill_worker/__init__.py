"""The prefill role of a worker: reads prompts in chunks, samples the first token, hands the KV over while it
is being computed.
"""
