"""What several scripts share: engines to measure, timings, reports, workloads."""
