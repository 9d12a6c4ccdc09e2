"""Kernels, and the compilers that the rest of a graph is handed to."""
