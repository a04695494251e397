"""The machine: model, paged KV, batches, sampling. Knows no Ray, no gRPC, no HTTP, no text."""
