"""Tree attention and gathers in ATen operators."""
