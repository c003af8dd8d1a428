"""Machines that run servable workers of servables: how they join a service, on both sides."""
