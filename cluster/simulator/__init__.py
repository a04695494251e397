"""The simulator: the real loops of workers and the real placement in virtual time, at a price per step."""
