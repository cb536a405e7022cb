"""Attention for Hopper in CuTe DSL: one kernel, compiled per variant and kept on disk.

Nothing here imports the compiler or the loader before a call on such a GPU asks for a kernel.
"""
