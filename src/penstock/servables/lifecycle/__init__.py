"""Loading, switching, draining and finding servables.  May import ``api``, ``process`` and ``schedule``."""
