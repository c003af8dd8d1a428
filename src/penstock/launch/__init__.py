"""Starts a program as several ranks, on one machine or several, and ends them together.  It knows no models."""
