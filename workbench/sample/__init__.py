"""`workbench sample`: a video by every mechanism, beside dense attention and an exact control."""
