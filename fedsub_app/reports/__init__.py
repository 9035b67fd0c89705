"""Reports on finished runs: records, comparisons, pictures, pages."""
