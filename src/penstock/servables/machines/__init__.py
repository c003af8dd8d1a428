"""Servable workers on other machines that join a service.  May import ``api``, ``process``, ``lifecycle``."""
