"""What a servable.py declares, and the plan that is made from it.  Imports no other sub-package of ``servables``."""
