"""What servable.py declares, and the plan made of it."""
