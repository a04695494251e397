"""The prefill role of a worker: reads prompts in chunks, hands their KV over, samples first tokens."""
