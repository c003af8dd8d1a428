"""Machines that run stage processes of servables: how they join a service, on both sides."""
