"""The run's page: what anybody may see of a run, in a browser."""
