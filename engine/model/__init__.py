"""The model: its configuration, its weights and the decoder; knows no pool, no batch, no text."""
