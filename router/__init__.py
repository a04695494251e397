"""The edge: text and choice. HTTP in, tokens out; knows workers by what they can do, no tensors and no
Ray.
"""
