"""Many runs: a batch of jobs, a paper's tables, sweeps."""
