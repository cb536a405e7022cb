"""`workbench apply`: an exported file read back, run in a model, and compared with another one."""
