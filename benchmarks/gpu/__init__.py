"""Parts of `make gpu-check`."""
