"""Models of a Hugging Face hub: names, plans, downloads, and the models on this machine.

It knows checkpoint folders and the memory of the machine, but neither engine nor command line.  ``huggingface_hub`` is
imported inside functions, because it takes longer to import than a bundle takes to open.
"""
