"""Kernels in C++, compiled on the machine they run on. Where that is not possible torch does their work."""
