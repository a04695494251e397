"""The CPU runtime: operators in C++, compiled on the machine that runs them, each with a twin in torch.

Owns the operators and the layers, linear layers and attention made of them. Chosen once at start by
`EngineConfig.cpu_kernels`; where they cannot be had, the engine runs on torch alone.
"""
