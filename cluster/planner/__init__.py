"""Sizing before spending: arithmetic of memory, time and money, and a simulation of the deployment."""
