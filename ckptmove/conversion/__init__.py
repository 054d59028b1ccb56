"""From a request to a policy, a plan and the files that it writes."""
