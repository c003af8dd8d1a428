"""The primary and its workers: processes that each run one model, on this machine or another one.

It may use ``llm``, ``engine`` and the layers below, and of ``serving`` the messages, keys and arrivals.
"""
