"""Triton kernels, each with a twin in plain torch of the same signature. The only room that imports triton.

Without a GPU they run in Triton's interpreter, when TRITON_INTERPRET=1 is set before the first import of a
kernel's module; `benchmarks/kernel_report.py` compiles them for GPUs that are not there.
"""
