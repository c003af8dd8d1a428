"""The declarations of a servable.py, and the plan made from them.  Imports no other sub-package of ``servables``."""
