"""The path of a GPU: Triton kernels and torch's matrix products, sampling on the device, recorded steps.

Imported only when it is chosen, since it loads triton. On a CPU the same code runs in Triton's interpreter,
for tests.
"""
