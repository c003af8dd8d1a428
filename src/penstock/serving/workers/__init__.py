"""The primary and its workers: processes that each run one model, on this machine or another."""
