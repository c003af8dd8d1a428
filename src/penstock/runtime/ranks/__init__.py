"""Programs over several processes: ranks on this host, and the stages of a pipeline on other machines."""
