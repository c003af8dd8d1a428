"""The declarations of a servable.py, and the manifest made from them.  Imports no other part of ``servables``."""
